"""Tiny models of Transformers with random weights, and their inputs."""

import copy

import torch

from mgk.hf.mixture_keys import MixtureKeys

LENGTH = 9
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Weights are large, because nearly uniform attention would hide errors.
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3, **TOKENS,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50, "decoder_start_token_id": 2, "init_std": 0.3,
    "forced_eos_token_id": None, **TOKENS,
}  # fmt: skip
# name -> class, configuration, settings
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "num_key_value_heads": 2, "sliding_window": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**SIZES, "scale_attn_by_inverse_layer_idx": True}),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
}


def make(name, **settings):
    import transformers

    model_class, config_class, usual = MODELS[name]
    config = getattr(transformers, config_class)(**{**usual, **settings})
    return getattr(transformers, model_class)(config).eval()


def copy_heads(model, projections):
    """Make heads 2 and 4 of every BERT layer copies of heads 1 and 3, in the named projections."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in projections and isinstance(module, torch.nn.Linear):
                for parameter in (module.weight, module.bias):
                    heads = parameter.unflatten(0, (4, -1))
                    heads[1::2] = heads[::2].clone()
    return model


def inputs(padding=None):
    """Return two sequences, the second shorter by three tokens."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padding is not None:
        mask[1, slice(3) if padding == "left" else slice(-3, None)] = 0
    return {"input_ids": torch.randint(3, 50, (2, LENGTH)) * mask, "attention_mask": mask}


def mixtures(model):
    return [module for module in model.modules() if isinstance(module, MixtureKeys)]


def randomize(model):
    """Set τ and priors to random values, which is not softmax attention."""
    with torch.no_grad():
        for mixture in mixtures(model):
            mixture.tau.uniform_(0.2, 1)
            mixture.prior.weights.normal_()
    return model


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits[batch["attention_mask"].bool()]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def small(model_class, config_class, **settings):
    import transformers

    return getattr(transformers, model_class)(getattr(transformers, config_class)(**{**SIZES, **settings}))


def literal(module, query, key, value, attention_mask, scaling=None, position_bias=None, s_aux=None, **extras):
    """Compute Eq. 9 and 10 with τ from the parameters of a converted layer; a sink is a key at 0 without a value."""
    mixture = module.mixture
    group = query.shape[1] // key.shape[1]
    if s_aux is not None:
        key, value = (torch.cat([tensor, torch.zeros_like(tensor[:, :, :1])], 2) for tensor in (key, value))
    keys = (key.unsqueeze(2) + mixture.shift.unsqueeze(-2)).repeat_interleave(group, 1)  # [B, H, M, S, D]
    prior = mixture.prior.weights.softmax(1).repeat_interleave(group, 0)  # [H, M, 1]
    tau = mixture.tau.repeat_interleave(group)[:, None, None]
    norms = tau * keys.square().sum(-1)  # [B, H, M, S]
    products = torch.einsum("bhld,bhmsd->bhlms", query, keys)
    weights = (prior.unsqueeze(1) * torch.exp(scaling * (products - 0.5 * norms.unsqueeze(2)))).sum(3)
    length = weights.shape[-1] - (s_aux is not None)
    factors = torch.ones_like(weights[..., :length])
    if position_bias is not None:
        factors = factors * position_bias.exp()
    if attention_mask is not None:
        factors = factors * (attention_mask == 0)
    if s_aux is not None:
        factors = torch.cat([factors, s_aux.exp()[:, None, None].expand(*factors.shape[:3], 1)], -1)
    weights = weights * factors
    output = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ value.repeat_interleave(group, 1)
    return output.transpose(1, 2), None


def use_literal_attention(original, converted):
    """Make the layers of a copy of a model compute the mixture of its converted layers, directly."""
    import transformers
    from transformers.masking_utils import eager_mask

    transformers.AttentionInterface.register("literal", literal)
    transformers.AttentionMaskInterface.register("literal", eager_mask)
    for path in converted.config.mgk["layers"]:
        layer = original.base_model.get_submodule(path)
        layer.config = copy.copy(layer.config)
        layer.config._attn_implementation_internal = "literal"
        layer.mixture = converted.base_model.get_submodule(path).mgk
    original.set_attn_implementation("eager")
