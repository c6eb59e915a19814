"""Report of an upcycled model: sizes, losses per layer, and fidelity before and after distillation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mgk._core.markdown import format_number, markdown_table


@dataclass(frozen=True)
class LayerReport:
    """Changes of one attention layer.

    Attributes:
        name: Name of the layer in model.base_model.
        heads: Number of query heads.
        key_heads: Numbers of key heads before and after.
        value_heads: Numbers of value heads before and after.
        key_loss: Share of the energy of the logits' keys that the merge loses, between 0 and 1.
        value_loss: Share of the energy of the values, weighted by the output projection, that the merge loses.
    """

    name: str
    heads: int
    key_heads: tuple[int, int]
    value_heads: tuple[int, int]
    key_loss: float
    value_loss: float


@dataclass(frozen=True)
class UpcycleReport:
    """Result of `mgk.hf.upcycle`.

    Attributes:
        layers: One entry per attention layer.
        parameters: Numbers of parameters before and after.
        cache_bytes: Bytes of keys and values per token before and after, in the dtype of the model.
        fidelity: Agreement with the original model on held-out text: {"merged": ..., "distilled": ...}; see
            `mgk.hf.upcycling.fidelity`.
        calibration_tokens: Tokens of the text that the merges are calibrated on.
        settings: Arguments of the call.
        distillation: Losses of the distillation, one entry per logged step.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
        >>> model = BertModel(BertConfig(vocab_size=64, **sizes)).eval()
        >>> batches = [{"input_ids": torch.randint(64, (4, 16))} for _ in range(8)]
        >>> _, report = mgk.hf.upcycle(model, num_value_heads=2, calibration=batches)
        >>> report.cache_bytes, report.layers[0].value_heads
        ((256, 192), (4, 2))
    """

    layers: list[LayerReport]
    parameters: tuple[int, int]
    cache_bytes: tuple[int, int]
    fidelity: dict[str, dict[str, float]]
    calibration_tokens: int
    settings: dict[str, Any]
    distillation: list[dict[str, float]] = field(default_factory=list)

    @property
    def cache(self) -> float:
        """Size of the cache relative to that of the original model.

        Examples:
            >>> from mgk.hf.upcycling.report import LayerReport
            >>> layer = LayerReport("layers.0", 4, key_heads=(4, 2), value_heads=(4, 4), key_loss=0.02, value_loss=0.0)
            >>> quality = {"merged": {"perplexity": 21.5}}
            >>> report = mgk.hf.UpcycleReport([layer], (2000, 1800), (512, 384), quality, 1000, settings={})
            >>> report.cache
            0.75
        """
        return self.cache_bytes[1] / self.cache_bytes[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values.

        Examples:
            >>> from mgk.hf.upcycling.report import LayerReport
            >>> layer = LayerReport("layers.0", 4, key_heads=(4, 2), value_heads=(4, 4), key_loss=0.02, value_loss=0.0)
            >>> quality = {"merged": {"perplexity": 21.5}}
            >>> report = mgk.hf.UpcycleReport([layer], (2000, 1800), (512, 384), quality, 1000, settings={})
            >>> report.to_dict()["layers"][0]["key_heads"]
            (4, 2)
        """
        return {**dataclasses.asdict(self), "cache": self.cache}

    def to_markdown(self) -> str:
        """Return the report as a page.

        Examples:
            >>> from mgk.hf.upcycling.report import LayerReport
            >>> layer = LayerReport("layers.0", 4, key_heads=(4, 2), value_heads=(4, 4), key_loss=0.02, value_loss=0.0)
            >>> quality = {"merged": {"perplexity": 21.5}}
            >>> report = mgk.hf.UpcycleReport([layer], (2000, 1800), (512, 384), quality, 1000, settings={})
            >>> print(report.to_markdown())
            # Upcycled model
            ...
            | parameters | 2,000 | 1,800 | 0.900 |
            ...
        """
        before, after = self.parameters
        sizes = markdown_table(
            [
                ["", "before", "after", "ratio"],
                ["parameters", f"{before:,}", f"{after:,}", format_number(after / before, 3)],
                ["cache, bytes per token", *(f"{size:,}" for size in self.cache_bytes), format_number(self.cache, 3)],
            ]
        )
        names = list(dict.fromkeys(name for values in self.fidelity.values() for name in values))
        quality = markdown_table(
            [["held-out text", *names]]
            + [
                [stage, *(format_number(values.get(name), 4) for name in names)]
                for stage, values in self.fidelity.items()
            ]
        )
        layers = markdown_table(
            [["layer", "query heads", "key heads", "value heads", "key energy lost", "value energy lost"]]
            + [
                [
                    layer.name,
                    str(layer.heads),
                    " → ".join(map(str, layer.key_heads)),
                    " → ".join(map(str, layer.value_heads)),
                    format_number(layer.key_loss, 4),
                    format_number(layer.value_loss, 4),
                ]
                for layer in self.layers
            ]
        )
        settings = markdown_table(
            [["setting", "value"], *([name, str(value)] for name, value in self.settings.items())]
        )
        parts = [
            "# Upcycled model",
            sizes,
            "## Fidelity to the original model",
            quality,
            "## Layers",
            layers,
            "## Settings",
            f"{self.calibration_tokens:,} tokens of calibration text.",
            settings,
        ]
        return "\n\n".join(parts) + "\n"
