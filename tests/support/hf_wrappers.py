"""Small Transformers wrappers with random parameters."""

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from mgk.hf import MGKConfig, MGKForCausalLM, MGKForSequenceClassification  # noqa: E402
from mgk.models.decoder import FORMS  # noqa: E402

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
CUTOFFS = {"paper": (8, 20), "modern": ()}
FEW = ("softmax", "smgk", "mgk-em", "mlk")  # one of each kind of cache, prior and key layout


def drawn(wrapper):
    """Perturb the parameters, so that all are different."""
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return wrapper.eval()


def lm(form="paper", **settings):
    fixed = {"vocab_size": 30, "max_position_embeddings": 40, "num_hidden_layers": 2, "cutoffs": CUTOFFS[form]}
    return drawn(MGKForCausalLM(MGKConfig(**{**fixed, **SIZES, **FORMS[form], **settings})))


def classifier(**settings):
    fixed = {"vocab_size": 30, "max_position_embeddings": 24, "num_hidden_layers": 2, "hidden_dim": 12, "num_labels": 3}
    return drawn(MGKForSequenceClassification(MGKConfig(kind="classifier", **{**fixed, **SIZES, **settings})))


def left_padded(*prompts):
    """Return prompts padded on the left to one length, and their attention mask."""
    length = max(map(len, prompts))
    tokens = torch.stack([F.pad(prompt, (length - len(prompt), 0), value=1) for prompt in prompts])
    mask = torch.stack([F.pad(torch.ones_like(prompt), (length - len(prompt), 0)) for prompt in prompts])
    return tokens, mask


def same(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
