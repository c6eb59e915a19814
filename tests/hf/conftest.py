"""Fixtures of the tests of mgk.hf, which run offline."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def prompts():
    return torch.randint(30, (9,)), torch.randint(30, (4,)), torch.randint(30, (6,))
