import re

import pytest

import fxpipe
from tests.fxpipe.cli.invoke import refused, run

TWO = ["--devices", "cpu,cpu", "--chunks", 4]


def succeeded(*args):
    result = run(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stderr == "", "it is quiet: this is no terminal"
    return result.stdout


def test_compile_reports_and_writes_what_is_asked_for(models):
    out = succeeded(
        *("compile", "own_models:build", *TWO, "--schedule", "1f1b"),
        *("--draw", "new/out.svg", "--level", "stage", "--report", "out.txt"),
        *("--timeline", "time.svg", "--code", "out.py", "--dump", "dump"),
    )
    report, wrote = out.split("wrote", 1)
    assert "4 micro-batches" in report
    assert re.findall(r"\S+\.\w+", wrote) == [
        "out.txt",
        "out.py",
        "time.svg",
        "new/out.svg",
        "dump/index.html",
    ]
    assert "new/out.svg (in a new folder, new)\n" in wrote
    assert (models / "out.txt").read_text() == report
    assert "stage 1" in (models / "new" / "out.svg").read_text()
    assert "<svg" in (models / "time.svg").read_text()
    compile((models / "out.py").read_text(), "out.py", "exec")
    assert (models / "dump" / "index.html").exists()


def on_a_terminal(monkeypatch, *args):
    """What is said while it works, all names of parts in order; results go elsewhere."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    bars = re.sub(r"\x1b\[[0-9;?]*\w", "", result.stderr)
    assert "\u2501" * 9 in bars and "%" in bars, "it is a bar"
    assert "compiling" not in result.stdout
    return bars


def test_on_a_terminal_a_compilation_says_which_pass_it_is_at(models, monkeypatch):
    bars = on_a_terminal(
        monkeypatch,
        *("compile", "own_models:build", *TWO, "--draw", "out.svg", "--report", "out.html"),
    )
    for part in ("compiling: trace", "compiling: partition", "compiling: verify", "drawing"):
        assert part in bars
    assert "writing the report: drawing" in bars
    assert "writing the report: trace" not in bars, "nothing is compiled for it"


def test_on_a_terminal_a_plan_and_a_measurement_say_what_they_are_at(models, monkeypatch):
    given = ["plan", "own_models:build", "--devices", "h100,h100"]
    bars = on_a_terminal(monkeypatch, *given)
    places = [bars.index(f"planning: {part}") for part in ("trace", "cost", "partition")]
    assert places == sorted(places)
    bars = on_a_terminal(monkeypatch, "bench", "own_models:build", *TWO, "--rounds", 2)
    assert all(f"measuring: step {i} of 2" in bars for i in (1, 2))


@pytest.mark.parametrize("command", ["compile", "plan", "bench"])
def test_inputs_that_the_model_does_not_take_are_said_to_be_so(models, command):
    devices = ["--devices", "h100,h100" if command == "plan" else "cpu,cpu"]
    message = refused(command, "own_models:build", *devices, "--input", "8,9")
    assert message.startswith("Named cannot be called with float32 [8, 9]: ")
    assert "mat1 and mat2 shapes" in message or "same reduction dim" in message  # on meta
    assert "Give other inputs with --input" in message


@pytest.mark.parametrize("command", ["compile", "explain", "plan", "bench"])
def test_a_model_of_a_dict_is_told_how_to_be_given_one(models, command):
    """The error is the model's own, of whatever type, and needs no traceback."""
    devices = ["--devices", "h100,h100" if command == "plan" else "cpu,cpu"]
    message = refused(command, "own_models:OfADict", *devices, "--input", "8,8")
    error, hint = message.splitlines()
    assert error.startswith("OfADict cannot be called with float32 [8, 8]: IndexError: ")
    assert 'return self.second(self.first(batch["image"])))' in error
    assert hint.endswith("let FACTORY be a function that returns (model, (inputs,))")
    assert run(command, "own_models:of_a_dict", *devices).exit_code == 0


def test_compile_draws_each_level_as_dot_without_graphviz(models, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for level in ("model", "stage", "pipeline", "step"):
        succeeded("compile", "own_models:build", *TWO, "--draw", "out.dot", "--level", level)
        assert (models / "out.dot").read_text().startswith(("digraph", "//", "strict"))


def test_a_report_that_ends_with_html_is_the_page(models):
    out = succeeded("compile", "own_models:build", *TWO, "--report", "new/out.html")
    assert out.endswith("wrote new/out.html (in a new folder, new)\n")
    assert "Named on 2 stages" in (models / "new" / "out.html").read_text()


def test_a_part_of_a_graph_is_drawn_in_full(models):
    part = ["--draw", "out.dot", "--stage", 1, "--microbatch", 2]
    for level in ("pipeline", "step"):
        succeeded("compile", "own_models:build", *TWO, *part, "--level", level)
        assert "cluster_stage_1_mb_2" in (models / "out.dot").read_text()


def test_compile_cuts_where_it_is_told(models):
    succeeded("compile", "own_models:build", *TWO, "--partition", "third", "--code", "out.py")
    report = succeeded("compile", "own_models:build", *TWO, "--partition", "third")
    rows = [line for line in report.splitlines() if line.startswith("│")]
    # A linear layer from 8 to 8 has 72 floats; two are in the first stage, one in the second.
    assert "576 B" in rows[0] and "288 B" in rows[1]


def test_compile_and_plan_cut_where_boundaries_allow_it(models):
    for command, devices in (("compile", TWO), ("plan", ["--devices", "h100,h100"])):
        text = succeeded(command, "own_models:build", *devices, "--boundaries", "third")
        assert "stage 0: first, relu, second\nstage 1: third, mul\n" in text


def test_each_stage_may_be_recomputed_in_segments_of_its_own(models):
    given = ["--checkpoint", "always", "--checkpoint-segments"]
    text = succeeded("plan", "own_models:build", "--devices", "h100,h100", *given, "1,2")
    assert "checkpoint: always, always in 2 segments" in text
    succeeded("compile", "own_models:build", *TWO, *given, "1,2")
    text = succeeded("plan", "own_models:build", "--devices", "h100,h100", *given, "auto")
    assert "checkpoint: always\n" in f"{text}\n", "all of it fits"
    said = refused("plan", "own_models:build", "--devices", "h100,h100", *given, "0")
    assert "0 is not in the range x>=1" in said


def test_each_stage_may_have_its_own_checkpoint_mode(models):
    modes = ["--checkpoint", "always,never"]
    text = succeeded("plan", "own_models:build", "--devices", "h100,h100", *modes)
    assert "checkpoint: always, never" in text
    succeeded("compile", "own_models:build", *TWO, *modes)
    said = refused("compile", "own_models:build", "--devices", "cpu,cpu,cpu", *modes)
    assert "checkpoint has 2 modes, and there are 3 stages" in said


def test_memory_and_the_optimizer_can_be_given(models):
    for command, devices in (("compile", TWO), ("plan", ["--devices", "h100,h100"])):
        text = succeeded(
            *(command, "own_models:build", *devices),
            *("--memory", "1GiB, 2GiB", "--optimizer", "sgd", "--chunks", "2"),
        )
        assert ("of 1.0 GiB, " if command == "compile" else "1024.0 MiB") in text
        said = refused(command, "own_models:build", *devices, "--memory", "1KiB")
        assert "the model does not fit into the devices' memory" in said


def test_keyword_inputs_and_sizes_will_do(models):
    for args in (["own_models:by_name"], ["own_models:Named", "--input", "8,8"]):
        assert "4 micro-batches" in succeeded("compile", *args, *TWO)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices", "cpu,cpuu"], "there is no device 'cpuu' here: give some of cpu"),
        (["--devices", "cpu,meta"], "there is no device 'meta' here: give some of cpu"),
        (["--devices", "cpu,,cpu"], "there is no device '' here"),
        (["--devices", "cpu,cuda:99"], "there is no device 'cuda:99' here"),
        (["--chunks", "0"], "'--chunks': 0 is not in the range x>=1"),
        (["--schedule", "2f2b"], "'2f2b' is not one of 'gpipe', '1f1b'"),
        (["--schedule", "zbv", "--stages", "3"], "2 lanes take 4 stages, not 3"),
        (["--draw", "out.png"], "'out.png' does not end with .svg or .dot or .gv"),
        (["--draw", "."], "'.' does not end with"),
        (["--report", "."], "'.' is a folder: give a file"),
        (["--level", "models"], "'models' is not one of 'model'"),
        (["--stage", "1"], "--stage and --microbatch say what to draw: give --draw, too"),
        (["--draw", "out.svg", "--stage", "7"], "no node is of stage 7: there are stages 0 to 1"),
        (["--draw", "out.svg", "--level", "stage", "--microbatch", "0"], "no micro-batches at"),
        (["--partition", "fourth"], "partition names 'fourth'"),
        (["--boundaries", "fourth"], "boundaries has 'fourth', which is the path of no module"),
        (["--dump", "own_models.py"], "own_models.py"),
        (["--report", "own_models.py/out.txt"], "own_models.py"),
    ],
)
def test_compile_refuses_what_makes_no_sense(models, args, message):
    devices = [] if "--devices" in args else ["--devices", "cpu,cpu"]
    assert message in refused("compile", "own_models:build", *devices, *args)


def test_a_model_that_cannot_be_traced_is_refused_with_the_line(models):
    message = refused("compile", "own_models:branches", *TWO)
    assert "own_models.py" in message


def test_plan_predicts_what_the_function_predicts(models):
    given = ["own_models:build", "--devices", "h100,v100", "--chunks", 4]
    text = succeeded("plan", *given, "--partition", "second")
    from own_models import build

    model, inputs = build()
    plan = fxpipe.plan(
        model, ["h100", "v100"], example_inputs=inputs, chunks=4, partition=["second"]
    )
    assert text.strip() == str(plan).strip()
    assert text == succeeded("plan", *given, "--partition", "second", "--meta")


def test_plan_knows_schedules():
    given = ["fxpipe.demo:UNet", "--input", "8,3,32,32", "--devices", "h100,h100"]
    text = succeeded("plan", *given, "--schedule", "interleaved_1f1b", "--stages", 4)
    assert "│ 3     │ 1 h100 │" in text
    assert "(interleaved_1f1b)" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Missing option '--devices'"),
        (["--devices", "h100,b9"], "no device 'b9' is known: give one of"),
        (["--devices", "h100", "--checkpoint", "often"], "checkpoint is 'often': give 'never', "),
        (["--devices", "h100,h100", "--chunks", "-1"], "not in the range"),
    ],
)
def test_plan_refuses_what_makes_no_sense(models, args, message):
    assert message in refused("plan", "own_models:build", *args)


def test_bench_compares_predicted_and_measured(models):
    options = ["--schedule", "1f1b", "--rounds", 1, "--draw", "out.svg"]
    out = succeeded("bench", "own_models:build", *TWO, *options)
    assert re.search(r"^predicted [\d.]+ \S+, measured [\d.]+ \S+ \([+-][\d.]+%\)$", out, re.M)
    assert re.search(r"^stage 1 backward: predicted [\d.]+ \S+, measured [\d.]+ ", out, re.M)
    assert re.search(r"^predicted from the measured times of the stages: [\d.]+ ", out, re.M)
    assert "that are predicted (stage 0 " in " ".join(out.split()), "with the causes"
    drawing = (models / "out.svg").read_text()
    assert "predicted" in drawing and "measured" in drawing


def test_bench_says_which_loss_it_has_run(models):
    out = succeeded("bench", "own_models:of_a_dataclass", *TWO, "--rounds", 1)
    assert "The loss of the step is the mean of what the model returns." in out
    assert "example_target" not in out, "the user has given no loss"
    out = succeeded("bench", "own_models:of_a_loss", *TWO, "--rounds", 1)
    assert "The loss of the step is that which the model returns." in out
    out = succeeded("bench", "own_models:build", *TWO, "--rounds", 1, "--inference")
    assert "The loss" not in out


def test_bench_says_what_cannot_be_trained(models):
    assert "returns no floating-point tensor" in refused("bench", "own_models:whole", *TWO)
    assert "'--rounds': 0 is not in" in refused("bench", "own_models:build", "--rounds", 0)


def test_explain_says_what_limits_the_speed_and_which_call_would_help(models):
    out = succeeded("explain", "own_models:build", "--devices", "cpu,cpu", "--chunks", 2)
    assert out.startswith("Named on 2 stages, 2 micro-batches")
    headings = ["Where the batch is", "How it was traced", "What limits the speed"]
    assert all(f"\n{heading}\n" in out for heading in [*headings, "What would help"])
    assert 'pipe = fxpipe.compile(model, ["cpu", "cpu"], ' in out
    assert "example_kwargs={}" not in out
    assert "The calls above are Python" in out


def test_outputs_only_are_planned_compiled_and_measured(models):
    common = ("own_models:build", "--chunks", 4, "--inference")
    assert "a call of 4 micro-batches" in succeeded("plan", *common, "--devices", "h100,h100")
    out = succeeded("compile", *common, "--devices", "cpu,cpu")
    assert "memory of the lanes (predicted, without gradients)" in out
    assert "measured" in succeeded("bench", *common, "--devices", "cpu,cpu", "--rounds", 1)


def test_the_number_of_micro_batches_may_be_left_open(models):
    out = succeeded("compile", "own_models:build", "--devices", "cpu,cpu", "--chunks", "auto")
    assert "chosen by prediction" in out
    for left in (("--chunks", "auto"), ("--schedule", "auto")):
        assert "micro-batch" in succeeded("plan", "own_models:build", "--devices", "h100", *left)
