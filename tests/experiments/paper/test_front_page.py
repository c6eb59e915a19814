"""Tables of the front pages."""

from experiments.paper import front_page, verdicts


def row(variant, kv_heads, value, **more):
    return {
        "recipe": "study", "metric": "step_ms_alone", "variant": variant, "heads": "8", "kv_heads": kv_heads,
        "key_heads": "", "value": value, "peak_mem_mb": "1200", "gpu": "NVIDIA H200", "commit": "abc", **more,
    }  # fmt: skip


def test_decoder_steps_are_relative_to_softmax_with_the_same_heads():
    rows = [
        row("softmax", "8", "50.0"),
        row("softmax", "4", "40.0"),
        row("smgk", "4", "44.0"),
        row("smgk", "8", "70.0"),
    ]
    rows += [
        row("softmax", "8", "48.0", commit="def"),
        row("smgk", "8", "60.0", commit="def"),
        row("mgk", "2", "90.0"),
        row("smgk", "8", "1.0", gpu="NVIDIA A100"),
    ]
    lines = front_page.decoder_steps(rows).splitlines()
    assert lines[2:] == [
        "| softmax, 8 heads | 48.0 | 1.000 | 1,200 | def |",
        "| softmax, 8 heads, 4 key and value heads | 40.0 | 1.000 | 1,200 | abc |",
        "| smgk, 8 heads, 4 key and value heads | 44.0 | 1.100 | 1,200 | abc |",
        "| smgk, 8 heads | 60.0 | 1.250 | 1,200 | def |",
        "| mgk, 8 heads, 2 key and value heads | 90.0 | – | 1,200 | abc |",
    ]


def test_decoder_steps_without_measurements():
    assert front_page.decoder_steps([]) == verdicts.MISSING_SENTENCE


def test_cpu_times_are_the_latest_of_each_shape():
    def ratio(variant, length, value, causal="False", name="forward", **more):
        return {
            "recipe": "benchmark-cpu", "metric": "time_ratio_to_sdpa", "variant": variant, "length": length,
            "causal": causal, "pass": name, "value": value, "commit": "abc", "cpu": "a CPU", **more,
        }  # fmt: skip

    rows = [
        ratio("smgk", "256", "3.0"),
        ratio("smgk", "256", "1.125", commit="def"),
        ratio("smgk", "256", "0.5", name="forward+backward"),
        ratio("mgk", "1024", "1.2", causal="True"),
        ratio("mgk", "1024", "9.0", metric="time_ms"),
    ]
    assert front_page.cpu_times(rows).splitlines() == [
        "| length | sMGK | sMGK, causal | MGK | MGK, causal |",
        "| --- | --- | --- | --- | --- |",
        "| 256 | 1.12 / 0.50 | – / – | – / – | – / – |",
        "| 1,024 | – / – | – / – | – / – | 1.20 / – |",
        "",
        "Commits of the measurements: abc, def, a CPU.",
    ]
    assert front_page.cpu_times([]) == verdicts.MISSING_SENTENCE
