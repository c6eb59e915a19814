"""Count the architectures of Transformers that mgk.hf.convert supports, with tiny random models.

    python benchmarks/transformers_models.py measure            # all; writes results/transformers-models.csv
    python benchmarks/transformers_models.py measure bert t5    # some model types, printed only
    python benchmarks/transformers_models.py page               # docs/transformers-models.md from the CSV

For every model type of four Auto classes: make a small configuration, build the model with random weights, convert it,
save it, and load it with the Auto class. The outputs must stay equal in every step.
"""

from __future__ import annotations

import argparse
import csv
import gc
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import mgk.hf
from mgk._core.io import replacing
from mgk.hf.example_inputs import make_example

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "transformers-models.csv"
PAGE = ROOT / "docs" / "transformers-models.md"
NO_MODEL = "no small model"
COLUMNS = ("auto_class", "model_type", "model_class", "converts", "layers", "reason", "parameters", "transformers")
AUTO_CLASSES = {
    "AutoModelForCausalLM": "Causal language models",
    "AutoModelForMaskedLM": "Masked language models",
    "AutoModelForSeq2SeqLM": "Encoder-decoders",
    "AutoModelForImageClassification": "Image classifiers",
}
# A configuration that could not be made small would need more memory than a machine has.
MAX_PARAMETERS = 30_000_000

# Sizes by the names of settings; a configuration gets those that it has.
TINY = {
    32: "hidden_size d_model n_embd embed_dim dim emb_dim model_dim embedding_size word_embed_proj_dim hidden_dim "
    "d_embed encoder_hidden_size decoder_hidden_size cross_attention_hidden_size input_hidden_size base_model_dim",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok num_experts_per_token "
    "moe_topk top_k_experts decoder_start_token_id eos_token_id num_mtp_layers num_blocks",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads "
    "num_local_experts num_experts n_routed_experts moe_num_experts num_router_experts num_encoder_attention_heads "
    "num_decoder_attention_heads linear_num_key_heads linear_num_value_heads mamba_n_heads",
    64: "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size n_positions "
    "max_position_embeddings max_seq_len max_source_positions max_target_positions block_ff_dim mlp_hidden_size "
    "mlp_dim max_sequence_length n_ctx shared_expert_intermediate_size dense_intermediate_size expert_ffn_hidden_size "
    "shared_intermediate_size prefix_dense_intermediate_size",
    8: "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim d_head "
    "linear_key_head_dim linear_value_head_dim index_head_dim global_head_dim",
    128: "vocab_size text_vocab_size vocab_size_per_layer_input entity_vocab_size",
    16: "q_lora_rank kv_lora_rank sliding_window patch_size moe_intermediate_size attention_window o_lora_rank "
    "local_attention_window_size index_topk state_size mamba_d_state",
    1: "n_group topk_group bos_token_id n_shared_experts num_shared_experts first_k_dense_replace",
    0: "pad_token_id num_nextn_predict_layers num_kv_shared_layers",
    48: "image_size",
}
# Values of settings that are None by default, for models that cannot be built without them.
VALUES_OF_NONE = {"vocab_size": 128, "head_dim": 8, "num_key_value_heads": 2, "pad_token_id": 0}
VALUES_OF_NONE |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
# Changes of the settings, in the order of the attempts. Some models require equal numbers of heads, and hybrid models
# have attention in some layers only; None stands for the types of layers of the default, in turn.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 8},
    {"num_hidden_layers": 8, "num_key_value_heads": 4, "linear_num_key_heads": 4},
    {"layer_types": None},
    {"head_dim": 16},
    {"rotary_dim": 4},
    {"attention_types": [[["global", "local"], 1]]},
    {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    {"attn_layer_indices": [1]},
    {"num_heads": 8},
    {"default_language": "en_XX"},
    {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_hidden_layers": 4},
    {"image_size": 224, "patch_size": 4, "embed_dim": 96, "hidden_size": 96},
)


def tiny_settings(config_class: Any, changes: dict[str, Any], with_none: bool) -> dict[str, Any]:
    """Return small values of the settings that a configuration class has, and of its parts.

    Args:
        config_class: Class of the configuration.
        changes: Other values, for the settings that the configuration has.
        with_none: Set VALUES_OF_NONE where the default is None.
    """
    config = config_class()
    defaults = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    defaults |= {name: defaults.get(target) for name, target in config_class.attribute_map.items()}
    settings: dict[str, Any] = {}
    for value, names in TINY.items():
        for name in names.split():
            current = defaults.get(name)
            if isinstance(current, int) and not isinstance(current, bool) and (current > value or value == 0):
                settings[name] = value
    for name, current in defaults.items():
        # Other tokens with a meaning must be in the vocabulary.
        if name.endswith(("token_id", "token_index")) and isinstance(current, int) and current > 2:
            settings.setdefault(name, 3)
        if with_none and current is None and name in VALUES_OF_NONE:
            settings[name] = VALUES_OF_NONE[name]
    if isinstance(defaults.get("layer_types"), list) and "num_hidden_layers" in defaults:
        settings["num_hidden_layers"] = 4  # hybrid models repeat a pattern of layers
    settings |= {name: value for name, value in changes.items() if name in defaults}
    if settings.get("layer_types", ()) is None:
        types = list(dict.fromkeys(defaults["layer_types"] or []))
        settings["layer_types"] = (types * 4)[:4] or None
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, transformers.PreTrainedConfig):
            settings[name] = {**tiny_settings(type(part), changes, with_none), "model_type": part.model_type}
    return settings


def build(model_class: Any) -> Any:
    """Return a small model with random weights that runs on its example; raise the first error if there is none."""
    errors: list[Exception] = []
    for with_none in (False, True):
        for changes in ATTEMPTS:
            try:
                settings = tiny_settings(model_class.config_class, changes, with_none)
                if "decoder" not in model_class.main_input_name and model_class.__name__.endswith("ForCausalLM"):
                    settings |= {"is_decoder": True} if hasattr(model_class.config_class(), "is_decoder") else {}
                with torch.device("meta"):
                    parameters = sum(p.numel() for p in model_class(model_class.config_class(**settings)).parameters())
                if parameters > MAX_PARAMETERS:
                    raise ValueError(f"its smallest configuration has {parameters:,} parameters")
                torch.manual_seed(0)
                model = model_class(model_class.config_class(**settings)).eval()
                example = make_example(model)
                with torch.no_grad():
                    model(**example)
                return model
            except Exception as error:  # models raise many types
                errors.append(error)
    raise errors[0]


def first_line(error: Exception) -> str:
    """Return the first line of an error message with what follows a colon, or the name of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(":")


def output_of(model: Any, example: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors of the model's output."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [value for value in model(**example).values() if isinstance(value, Tensor)]


def check_loading(model: Any, auto_class: str) -> None:
    """Raise an error if the Auto class does not load the same model, with random mixture keys.

    Some Auto classes list a class whose configuration they do not list: they do not load the original model either.
    """
    example = make_example(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".mgk.tau"):
                parameter.uniform_(0.2, 1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        auto: Any = getattr(transformers, auto_class)
        is_listed = type(model).original_class.config_class in auto._model_mapping
        loaded = (auto.from_pretrained if is_listed else mgk.hf.load_converted)(folder).eval()
    if type(loaded) is not type(model):
        raise ValueError(f"{auto_class} loads a {type(loaded).__name__}")
    for actual, expected in zip(output_of(loaded, example), output_of(model, example), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


def measure(auto_class: str, model_type: str, class_name: str) -> dict[str, Any]:
    """Convert a tiny model of an architecture, save and load it; return a row of the table."""
    row: dict[str, Any] = {
        "auto_class": auto_class,
        "model_type": model_type,
        "model_class": class_name,
        "converts": "no",
    }
    row |= {"layers": 0, "reason": "", "parameters": 0, "transformers": transformers.__version__}
    try:
        model = build(getattr(transformers, class_name))
    except Exception as error:
        return {**row, "reason": f"{NO_MODEL}: {first_line(error)}"}
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    try:
        mgk.hf.convert(model)
    except ValueError as error:
        message = first_line(error).removeprefix("model ").replace(class_name, "the model")
        return {**row, "reason": message.removeprefix("is a the model, ").replace("none of whose layers", "no layer")}
    row["layers"] = len(model.config.mgk["layers"])
    try:
        check_loading(model, auto_class)
    except Exception as error:
        return {**row, "reason": f"does not load: {first_line(error)}"}
    return {**row, "converts": "yes"}


def architectures(model_types: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield Auto class, model type and model class of all architectures, or of those of some model types."""
    for auto_class in AUTO_CLASSES:
        names: Any = getattr(transformers, auto_class)._model_mapping._model_mapping
        for model_type, classes in names.items():
            if not model_types or model_type in model_types:
                yield auto_class, model_type, classes if isinstance(classes, str) else classes[0]


def page(rows: list[dict[str, str]]) -> str:
    """Return the Markdown page of the table."""
    version = f"Transformers {rows[0]['transformers']}"
    lines = [
        "# Transformers models that can be converted",
        "",
        "Generated by `python benchmarks/transformers_models.py page` from `results/transformers-models.csv`.",
        "",
        f"`mgk.hf.convert` was run on a small random model of every architecture of four Auto classes ({version}).",
        "A model counts if its outputs are unchanged by the conversion, and if the Auto class loads the saved model",
        "with equal outputs; `mgk.hf.load_converted` does so where the Auto class does not load the original model.",
        "*Not tried* means that no small random model could be built; the CSV file has the error.",
        "[The guide](guide.md#a-pretrained-transformers-model) describes the conversion.",
        "",
        "| | architectures | converted |",
        "|---|---|---|",
    ]
    groups = {name: [row for row in rows if row["auto_class"] == name] for name in AUTO_CLASSES}
    for name, title in AUTO_CLASSES.items():
        count = sum(row["converts"] == "yes" for row in groups[name])
        lines.append(f"| {title} (`{name}`) | {len(groups[name])} | {count} |")
    for name, title in AUTO_CLASSES.items():
        types: dict[str, list[str]] = {}
        for row in sorted(groups[name], key=lambda row: row["model_type"]):
            reason = "converted" if row["converts"] == "yes" else row["reason"].replace("|", "\\|")
            # Errors about the sizes of the small model differ for almost every model type, as do names of layers.
            reason = "not tried" if reason.startswith(NO_MODEL) else re.sub(r" in its \w+,", ",", reason)
            types.setdefault(reason, []).append(f"`{row['model_type']}`")
        lines += ["", f"## {title}", "", "| result | model types |", "|---|---|"]
        # Converted models first, then the most frequent reasons.
        for reason in sorted(types, key=lambda reason: (reason != "converted", -len(types[reason]), reason)):
            lines.append(f"| {reason} | {', '.join(types[reason])} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "page"))
    parser.add_argument("model_types", nargs="*", help="Model types; default: all, written to the CSV file.")
    options = parser.parse_args(arguments)
    if options.command == "page":
        with RESULTS.open(newline="", encoding="utf-8") as file:
            text = page(list(csv.DictReader(file)))
        with replacing(PAGE) as path:
            path.write_text(text, encoding="utf-8")
        return
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    rows = []
    for names in architectures(options.model_types):
        rows.append(measure(*names))
        print(",".join(str(rows[-1][column]) for column in COLUMNS), flush=True)
        gc.collect()
    if not options.model_types:
        with replacing(RESULTS) as path, path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
