"""Fewer key heads and value heads for a pretrained model: `mgk.hf.upcycle`.

Steps: find the attention layers (`layers`), collect second moments of queries, keys and values on the user's text
(`moments`), group heads (`grouping`) and merge them (`algebra`, `weights`), fit the output projections (`refit`), and
optionally distil from the original model (`distil`). `budget` chooses the numbers of heads for a given cache.
"""

from mgk.hf.upcycling.report import LayerReport, UpcycleReport
from mgk.hf.upcycling.upcycle import upcycle

__all__ = ["LayerReport", "UpcycleReport", "upcycle"]
