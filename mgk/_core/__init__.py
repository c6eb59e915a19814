"""Private parts that several packages share.

- Operators: `calls` (records of a call), `repeated_calls`, `validation`, `operator_checks`, `masks`, `heads`,
  `precision`; shared by several backends: `query_blocks`, `logit_terms`, `linear_features`.
- Layers: `layer_checks`, `attention_projections`, `key_projections`, `priors`, `em`, `em_checkpointing`,
  `from_softmax`, `head_shards` (tensor parallelism), `eval_mode`.
- Files and figures: `io`, `checksums`, `markdown`, `palette`. Others: `integers`, `progress`, `deprecated_paths`.

Shapes: B batch, H query heads, Hk key heads, M components, L queries, S keys, D head dimension, E value dimension,
F features, N packed sequences, P positions with separate priors.
"""
