"""`mgk analyze`: inputs, options and messages."""

import errno
import json
import operator
import signal
import sys
import zlib

import numpy as np
import pytest
import torch

from mgk import tasks
from mgk.cli import main
from mgk.models import DecoderConfig, LanguageModel, save_model
from tests.support.analyzed_runs import TASK, make_run, read_csv, run_analyze
from tests.support.remote_code import make_repository


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make a run whose analysis draws no figures, to save time."""
    monkeypatch.setattr("mgk.analysis.report.figures.draw_all", lambda *arguments: [])
    monkeypatch.setitem(tasks.TASKS, "tiny", TASK)
    return make_run(tmp_path / "run", "smgk", 2)


@pytest.fixture
def expect_error(monkeypatch, capsys):
    """Run the command as from a shell and expect exit code 2 and one line with a message."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)

    def run_command(message, *arguments):
        monkeypatch.setattr(sys, "argv", ["mgk", "analyze", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert exit_info.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("mgk: ")
        assert message in lines[0]

    return run_command


def test_token_ids_from_files(run, tmp_path):
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(["3"] * 20) + "\n" + ",".join(["4"] * 30))
    assert run_analyze(run, "--ids", ids, "--removal", 0).exception is None
    assert {row["size"] for row in read_csv(run / "analysis" / "ranks.csv")} == {"20", "30"}
    np.savez(tmp_path / "ids.npz", np.full((2, 40), 5))
    (tmp_path / "ids.npz").rename(tmp_path / "ids.npy")
    assert "it is not a .npy file" in str(run_analyze(run, "--ids", tmp_path / "ids.npy").exception)
    np.save(tmp_path / "ids.npy", np.full(100, 5))
    data = (tmp_path / "ids.npy").read_bytes()
    (tmp_path / "ids.npy").write_bytes(data.replace(b"(100,)", b"(9999 "))
    assert "ids.npy must hold integers" in str(run_analyze(run, "--ids", tmp_path / "ids.npy").exception)
    np.save(tmp_path / "ids.npy", np.full((2, 40), 5))
    assert run_analyze(run, "--ids", tmp_path / "ids.npy", "--length", 10, "--removal", 0).exception is None
    assert {row["size"] for row in read_csv(run / "analysis" / "ranks.csv")} == {"10"}


def test_options_reach_the_analysis(run, tmp_path, expect_error):
    options = [run, "--data-dir", tmp_path / "data", "--removal", 0, "--matrices", 4]

    def ranks(*more):
        assert run_analyze(*options, *more).exception is None
        return [(row["size"], row["rank"]) for row in read_csv(run / "analysis" / "ranks.csv")]

    plain = ranks()
    assert ranks() == plain
    assert ranks("--seed", 1) != plain
    assert all(int(rank) == 1 for _, rank in ranks("--threshold", 0.9))
    assert run_analyze(*options, "--split", "dev").exception is None
    assert "2 examples of tiny, dev" in (run / "analysis" / "report.html").read_text()
    expect_error("must be one of", *options, "--split", "nothing")
    expect_error("memory is too small to rank a", *options, "--memory", "1e-5")


def test_equal_runs_get_different_names(run, tmp_path):
    other = make_run(tmp_path / "elsewhere" / "run", "smgk", 2)
    ids = tmp_path / "ids.txt"
    ids.write_text("3 " * 30)
    out = tmp_path / "out"
    # A file of an earlier analysis.
    stale = out / "maps" / "1-run" / "layer9-head1-0000.png"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"x")
    result = run_analyze(run, other, "--ids", ids, "--removal", 0, "--map-size", 8, "--out", out)
    assert result.exception is None, result.output
    assert {row["model"] for row in read_csv(out / "layers.csv")} == {f"smgk:2 tiny seed 0 ({x})" for x in (run, other)}
    assert not stale.exists()
    for number in (1, 2):
        assert len(list((out / "maps" / f"{number}-run").glob("*.png"))) == 2 * 2


def test_length_of_examples_of_the_task(run, tmp_path, expect_error):
    options = ["--data-dir", tmp_path / "data", "--removal", 0]
    assert run_analyze(run, *options, "--length", 12).exception is None
    assert {row["size"] for row in read_csv(run / "analysis" / "ranks.csv")} == {"12"}
    expect_error("--length matches no example", run, *options, "--length", 60)
    expect_error("is more than the model's 60 positions", run, *options, "--length", 61)


def test_language_model_on_its_data_and_on_text(tmp_path, monkeypatch, expect_error):
    monkeypatch.setattr("mgk.analysis.report.figures.draw_all", lambda *arguments: [])
    config = DecoderConfig(
        vocab_size=256, max_length=24, embed_dim=16, ffn_dim=16, num_layers=2, num_heads=2, head_dim=8, variant="smgk"
    )
    run = tmp_path / "run"
    save_model(LanguageModel(config), run / "best")
    (run / "run.json").write_text(json.dumps({"task": "bytes", "recipe": "bytes", "row": "smgk:2", "seed": 0}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("a text to model, over and over. " * 999)
    result = run_analyze(run, "--data-dir", tmp_path / "data", "--matrices", 6, "--removal", 2)
    assert result.exception is None, result.output
    assert "% fewer FLOPs" in result.output
    assert {row["size"] for row in read_csv(run / "analysis" / "ranks.csv")} == {"24"}
    assert run_analyze(run, "--text", "some words of mine", "--removal", 0).exception is None
    page = (run / "analysis" / "report.html").read_text()
    assert '"tokens":["s","o","m","e","␣","w"' in page
    expect_error("--text is 5 tokens long, and at least 8 are needed", run, "--text", "hello")


def test_errors_of_runs_are_one_line(run, tmp_path, expect_error):
    expect_error("is not a run directory (no run.json)", tmp_path / "nowhere")
    expect_error("give one or more run directories, or --hf MODEL")
    expect_error("--text is not supported by this model, whose task has no text", run, "--text", "some text of mine")
    expect_error("--images requires --hf", run, "--images", "x.png")
    expect_error("--memory must be more than 0", run, "--memory", "0")
    ids = tmp_path / "ids.txt"
    for text, message in (
        ("1 2 3", "a sample of 3 tokens, and at least 8"),
        ("1 b", "integers"),
        ("99 " * 9, "ends at 31"),
    ):
        ids.write_text(text)
        expect_error(message, run, "--ids", ids)
    expect_error("--ids must name a file", run, "--ids", tmp_path / "none")
    weights = run / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    expect_error("is damaged", run, "--ids", ids)
    weights.unlink()
    expect_error("model.safetensors is missing", run, "--ids", ids)
    (run / "run.json").write_text("{")
    expect_error("run.json is damaged", run)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Save a GPT-2 with random weights and a word-level tokenizer."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.3}
    config = transformers.GPT2Config(**sizes, **ends)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    words = {word: n for n, word in enumerate(["?", "<s>", "</s>", "the", "cat", "sat", "on", "mat"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


def test_transformers_model_on_text(gpt2, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 3)
    result = run_analyze(
        "--hf", gpt2, "--text", tmp_path / "text.txt", "--text", "the mat " * 40, "--out", tmp_path / "out"
    )
    assert result.exception is None, result.output
    assert "of 4 heads are effectively different" in result.output
    assert "Each head of each layer costs about" in result.output
    # 18 words, and 80 words truncated to the model's 32 positions.
    assert {row["size"] for row in read_csv(tmp_path / "out" / "ranks.csv")} == {"18", "32"}
    assert '"tokens":["the","cat","sat"' in (tmp_path / "out" / "report.html").read_text()


def test_vision_model_on_images(tmp_path, expect_error):
    transformers = pytest.importorskip("transformers")
    from matplotlib import image

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**small, image_size=16, patch_size=4)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    image.imsave(tmp_path / "x.png", np.random.default_rng(0).random((20, 24, 3)))
    result = run_analyze("--hf", tmp_path / "vit", "--images", tmp_path / "x.png", "--out", tmp_path / "out")
    assert result.exception is None, result.output
    assert {row["size"] for row in read_csv(tmp_path / "out" / "ranks.csv")} == {"17"}
    (tmp_path / "y.png").write_text("no image")
    expect_error("is not a readable image", "--hf", tmp_path / "vit", "--images", tmp_path / "y.png")
    # 60,000 × 60,000 pixels; the size is in the header.
    png = bytearray((tmp_path / "x.png").read_bytes())
    png[16:24] = 2 * (60_000).to_bytes(4, "big")
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    (tmp_path / "z.png").write_bytes(png)
    expect_error("z.png is not a readable image (Image size", "--hf", tmp_path / "vit", "--images", tmp_path / "z.png")
    expect_error("is not a file", "--hf", tmp_path / "vit", "--images", tmp_path)


def test_errors_of_transformers_models_are_one_line(gpt2, tmp_path, expect_error):
    transformers = pytest.importorskip("transformers")
    expect_error("--hf requires an input", "--hf", gpt2)
    expect_error("--text is 2 tokens long, and at least 8 are needed", "--hf", gpt2, "--text", "the cat")
    expect_error("18 tokens long, and at least 20 are needed", "--hf", gpt2, "--text", "the cat " * 9, "--length", 20)
    expect_error("give only one of --text, --ids and --images", "--hf", gpt2, "--text", "a", "--images", "b")
    expect_error("--images needs a vision model", "--hf", gpt2, "--images", "b")
    expect_error("cannot be loaded", "--hf", tmp_path, "--text", "a")
    expect_error("cannot be loaded", "--hf", tmp_path / "nothing", "--text", "a")
    ids = tmp_path / "ids.txt"
    ids.write_text("70 " * 9)
    expect_error("vocabulary ends at 63", "--hf", gpt2, "--ids", ids)
    ids.write_text("7 " * 9)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, **ends)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    expect_error("has no attention layers", "--hf", tmp_path / "mamba", "--ids", ids)
    expect_error("--text needs a tokenizer", "--hf", tmp_path / "mamba", "--text", "the cat " * 9)
    weights = tmp_path / "mamba" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    expect_error("cannot be loaded", "--hf", tmp_path / "mamba", "--ids", ids)


@pytest.mark.parametrize("call", ["os.stat", "pathlib.Path.read_text"])
def test_unreadable_text_file_is_an_error(run, tmp_path, monkeypatch, expect_error, call):
    """The calls are replaced because root may read every file."""
    file = tmp_path / "notes"
    file.write_text("some text of mine")
    function = operator.attrgetter(call.partition(".")[2])(sys.modules[call.partition(".")[0]])

    def deny(path, *arguments, **options):
        if str(path) == str(file):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return function(path, *arguments, **options)

    monkeypatch.setattr(call, deny)
    expect_error(f"--text: {file} cannot be read: Permission denied", run, "--text", file)


def test_code_of_a_repository_runs_only_with_the_option(tmp_path, monkeypatch, expect_error):
    pytest.importorskip("transformers")
    marker = make_repository(tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "ids.txt").write_text("7 " * 9)
    arguments = ("--hf", tmp_path / "model", "--ids", tmp_path / "ids.txt", "--out", tmp_path / "out")
    expect_error("pass --trust-remote-code to run it", *arguments)
    assert not marker.exists()
    result = run_analyze(*arguments, "--trust-remote-code")
    assert result.exception is None, result.output
    assert marker.exists()
    expect_error("--trust-remote-code requires --hf", tmp_path, "--trust-remote-code")
