"""mgk upcycle."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from mgk._core.io import exclusive, write_atomically
from mgk._core.validation import fail, first_line
from mgk.cli.app import app, check_output_directory, import_hf
from mgk.cli.help_texts import epilog
from mgk.cli.progress import progress_bar


@app.command(epilog=epilog("upcycle"))
def upcycle(
    model: Annotated[
        str, typer.Argument(help="Transformers model: a directory or a name on the Hub; or a run of a language model.")
    ],
    text: Annotated[list[Path], typer.Option(help="Calibration text, one sample per line; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Directory of the new model; must not exist.")],
    key_heads: Annotated[int | None, typer.Option(help="Key heads per layer; default: unchanged.")] = None,
    value_heads: Annotated[int | None, typer.Option(help="Value heads per layer; default: unchanged.")] = None,
    cache: Annotated[
        float | None, typer.Option(help="Share of the present cache; chooses the numbers of heads per layer.")
    ] = None,
    mixture: Annotated[bool, typer.Option("--mixture", help="Add mixture keys (sMGK) to the merged heads.")] = False,
    components: Annotated[int, typer.Option(help="With --mixture: Gaussians per key.")] = 2,
    distil_steps: Annotated[int, typer.Option(help="Training steps that fit the new model to the original.")] = 0,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the distillation.")] = 3e-4,
    train_all: Annotated[
        bool, typer.Option("--train-all", help="Distil all parameters instead of attention and normalization layers.")
    ] = False,
    length: Annotated[int, typer.Option(help="Maximum number of tokens per sample.")] = 256,
    batch: Annotated[int, typer.Option(help="Samples per batch.")] = 32,
    method: Annotated[str, typer.Option(help="svd, or mean (grouped-query attention's initialization).")] = "svd",
    seed: Annotated[int, typer.Option(help="Seed of the order of the samples.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model's repository, if it has any.")
    ] = False,
) -> None:
    """Merge key heads and value heads of a pretrained model, and write the smaller model with a report.

    An interrupted distillation continues if the same command is run again.
    """
    if not model.strip():
        fail("model", f"must be a directory or a name on the Hub, got {model!r}")
    if out.exists() or out.is_symlink():
        fail("--out", f"{out} exists: choose a new directory")
    check_output_directory("--out", out)
    if key_heads is None and value_heads is None and cache is None:
        raise ValueError("give --key-heads, --value-heads or --cache")
    texts = _read_texts(text)
    import_hf("mgk upcycle")
    import mgk.hf

    original, tokenizer = _load(model, trust_remote_code)
    partial = out.with_name(f"{out.name}.partial")
    with _partial_directory(partial, out), progress_bar() as progress:
        with _options_in_errors():
            changed, report = mgk.hf.upcycle(
                original, num_key_heads=key_heads, num_value_heads=value_heads, cache=cache, calibration=texts,
                tokenizer=tokenizer, mixture=mixture, num_components=components, method=method, length=length,
                batch_size=batch, distil_steps=distil_steps, learning_rate=lr,
                trainable="all" if train_all else "attention", seed=seed, state=partial, progress=progress,
            )  # fmt: skip
        finished = partial / "model"
        shutil.rmtree(finished, ignore_errors=True)
        changed.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        write_atomically(finished / "report.md", report.to_markdown())
        write_atomically(finished / "report.json", json.dumps({"model": model, **report.to_dict()}, indent=1) + "\n")
        finished.rename(out)
    before, after = report.parameters
    print(f"cache: {report.cache:.3f} of the original   parameters: {before:,} to {after:,}")
    for stage, values in report.fidelity.items():
        print(f"{stage}: " + "   ".join(f"{name} {value:.4f}" for name, value in values.items()))
    print(f"model: {out}   report: {out / 'report.md'}")


# Options by the names of the arguments of mgk.hf.upcycle.
OPTIONS = {
    "num_key_heads": "--key-heads",
    "num_value_heads": "--value-heads",
    "num_components": "--components",
    "distil_steps": "--distil-steps",
    "learning_rate": "--lr",
    "batch_size": "--batch",
    "calibration": "--text",
    "cache": "--cache",
    "length": "--length",
    "method": "--method",
    "seed": "--seed",
    "state": "--out",
}


@contextmanager
def _options_in_errors() -> Iterator[None]:
    """Replace the names of arguments of mgk.hf.upcycle by those of the options in errors."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for argument, option in OPTIONS.items():
            # Names such as "length" are also words of the message: only its first word names the argument.
            if message.startswith(f"{argument} "):
                message = option + message.removeprefix(argument)
            if argument.startswith("num_"):
                message = message.replace(argument, option)
        raise ValueError(message) from error


def _read_texts(paths: list[Path]) -> list[str]:
    """Return the non-empty lines of text files."""
    lines: list[str] = []
    for path in paths:
        if not path.is_file():
            fail("--text", f"{path} is not a file")
        try:
            lines += path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"--text: {path} is not UTF-8 text") from error
    return [line for line in lines if line.strip()]


def _load(name: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load a model with the class named by its configuration, and its tokenizer."""
    import torch
    import transformers

    import mgk.hf
    from mgk.hf.registration import find_model_class
    from mgk.hf.tokenizer import has_vocabulary
    from mgk.models.run_directory import RunDirectory

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    trust = {"trust_remote_code": trust_remote_code}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if RunDirectory(name).description.is_file():
        tokenizer = mgk.hf.tokenizer_of_run(name)  # first: its message about runs of other models is clearer
        return mgk.hf.MGKForCausalLM.from_run(name).to(device), tokenizer
    try:
        config = transformers.AutoConfig.from_pretrained(name, **trust)
        model_class = find_model_class(config) or transformers.AutoModel
        model = model_class.from_pretrained(name, dtype="auto", use_safetensors=True, **trust)
    # Missing and damaged files raise many types; the first line of the message names the cause.
    except Exception as error:
        reason = first_line(error)
        if not trust_remote_code and "trust_remote_code" in str(error):
            reason = "it needs Python code of its repository: read that code, then pass --trust-remote-code to run it"
        raise ValueError(f"{name} cannot be loaded: {reason}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **trust)
    except Exception:
        tokenizer = None
    if not has_vocabulary(tokenizer):
        raise ValueError(f"--text needs a tokenizer, and {name} has none: call mgk.hf.upcycle with token ids")
    return model.to(device).eval(), tokenizer


@contextmanager
def _partial_directory(partial: Path, out: Path) -> Iterator[None]:
    """Lock the directory of unfinished files; remove it, unless it holds the state of a distillation."""
    is_new = not partial.exists()
    try:
        with exclusive(partial / "lock", str(out), "wait for it to end, or choose another --out"):
            yield
    except BaseException as error:
        shutil.rmtree(partial / "model", ignore_errors=True)
        has_state = any(partial.glob("distillation.*"))
        if has_state and isinstance(error, KeyboardInterrupt | SystemExit):
            print("Stopped. Run the same command again to continue.", file=sys.stderr)
        if is_new and not has_state:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(partial, ignore_errors=True)
