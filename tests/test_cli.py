"""The command line as a user meets it: processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec.kernels import native_library
from tests.server.conftest import make_folder
from tests.server.real_engine import add_weights
from tests.toy import compiled_native

PROMPT = "abcabcabcabcabc"
COMMAND = (sys.executable, "-P", "-m", "specdec.cli")
# In fp32 the toy's tokens are the same on every processor; what adaptive control drafts is not.
QUICK = (
    *("--threads", "1", "--kv-memory-mib", "8", "--max-tokens", "40", "--weights", "fp32"),
    *("--control", "fixed"),
)
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def without_notice(stderr: str) -> str:
    """What was said besides that the native forward is not used here, if it is not."""
    return re.sub(r"\Aspecdec: using PyTorch's .*\n", "", stderr)


@dataclass(frozen=True)
class Shell:
    """Runs the command line in a folder of its own, with a toy checkpoint.

    The folder is the cache, too, and holds nothing but the compiled native forward.
    """

    model: Path
    home: Path

    def environment(self, **more: str) -> dict[str, str]:
        folders = {"SPECDEC_CACHE": str(self.home), "TMPDIR": str(self.home)}
        inherited = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
        return {**inherited, **folders, "OMP_NUM_THREADS": "1", **more}

    def run(
        self, *arguments: str, stdin: str = "", **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.home,
            env=self.environment(**more),
        )

    def generate(self, *arguments: str, stdin: str = "") -> dict[str, Any]:
        """What `generate --json` prints."""
        done = self.run(
            *("generate", "--json", "--model", str(self.model), *QUICK, *arguments), stdin=stdin
        )
        assert (done.returncode, without_notice(done.stderr)) == (0, "")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def on_terminal(self, *arguments: str, **more: str) -> str:
        """What the command writes to a terminal of its own."""
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [*COMMAND, *arguments], stdout=theirs, cwd=self.home, env=self.environment(**more)
        ):
            os.close(theirs)
            parts: list[bytes] = []
            while True:
                try:
                    parts.append(os.read(ours, 4096))
                except OSError:  # how Linux reports the end of a terminal
                    break
        os.close(ours)
        return b"".join(parts).decode(errors="replace").replace("\r\n", "\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy checkpoint on disk whose random bytes repeat often enough for drafts to be accepted."""
    folder = make_folder(tmp_path_factory.mktemp("cli") / "model")
    add_weights(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight *= 0.1  # the nearer to 0, the more a token is followed by itself
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def shell(model: Path, tmp_path: Path) -> Shell:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "native").symlink_to(compiled_native())
    return Shell(model, tmp_path / "home")


# --- what is wrong is one line, and nothing is left behind ---


def check_refusal(shell: Shell, arguments: str, words: str, exit_code: int, **more: str) -> None:
    done = shell.run(*arguments.split(), **more)
    assert done.returncode == exit_code, done
    assert re.fullmatch(rf"specdec: .*{words}.*\n", done.stderr), done.stderr
    assert done.stdout == ""
    assert {path.name for path in shell.home.iterdir()} <= {"native", "step-cost"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generate --nope x", "No such option: --nope"),
        ("nope", "No such command 'nope'"),
        ("generate --file missing.txt", r"cannot read missing\.txt: No such file"),
        ("generate --file /", "cannot read /: Is a directory"),
        ("generate x --prediction missing.txt", r"cannot read missing\.txt: No such file"),
        ("generate x --prediction /", "cannot read /: Is a directory"),
        (f"generate x --prediction {sys.executable}", "is not UTF-8 text"),
        ("generate - --prediction -", "standard input is either the prompt or the prediction"),
        ("generate --node-budget -1 x", "node budget must be between 0 and 255, not -1"),
        ("generate --control magic x", "unknown control 'magic'; choose from adaptive, fixed"),
        ("serve --control magic", "unknown control 'magic'; choose from adaptive, fixed"),
        ("generate --latency-weight 2 x", "latency weight must be between 0 and 1, not 2"),
        ("serve --latency-weight nan", "latency weight must be between 0 and 1, not nan"),
        ("info --watch --interval 0", "--interval must be between 0.1 and 3600 seconds, not 0"),
        ("info --watch --url nope", "--url must be like http://127.0.0.1:8000, not 'nope'"),
        ("info --url http://127.0.0.1:8000", "--url and --interval need --watch"),
        ("generate --threads 100000 x", "threads must be at most"),
        ("generate --weights int3 x", "unknown weights 'int3'; choose from auto, bf16"),
        ("generate --kv fp8 x", "an fp8 KV cache needs a GPU; use --kv auto"),
        ("generate --backend torch --weights int4 x", "int4 weights are served on a CPU by"),
        ("generate --device cuda --backend native x", "the native backend is a CPU's"),
        ("serve --backend onnx", "unknown backend 'onnx'; choose from auto, native, torch"),
        ("generate --logprobs 2 x", "--logprobs needs --json"),
        ("generate --temperature nan x", "temperature must be at least 0 .*not nan"),
        ("generate --temperature inf x", "temperature must be at least 0 .*not inf"),
        ("generate --top-p 0 x", "top_p must be above 0"),
        ("generate --max-tokens many x", "Invalid value for '--max-tokens'"),
        ("generate x --file y", "give one of: a prompt, --file FILE, --messages FILE"),
        ("generate", "give one of: a prompt"),
        ("generate x --raw --system y", "--system needs the chat template"),
        ("serve --port 70000", "--port"),
        ("serve --port -1", "--port"),
    ],
)
def test_bad_input_is_refused_before_torch_is_imported(
    shell: Shell, tmp_path: Path, arguments: str, words: str
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    check_refusal(shell, arguments, words, 2, PYTHONPATH=path)


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        ("generate --messages -", "{", "--messages is not valid JSON: .*"),
        ("generate --messages -", "[" * 100_000, "--messages is not valid JSON: .*"),
        ("generate --messages -", '[{"role": "user"}]', "--messages must be a list like .*"),
        ("generate -", "", "the prompt is empty"),
    ],
)
def test_bad_standard_input(shell: Shell, arguments: str, stdin: str, words: str) -> None:
    done = shell.run(*arguments.split(), stdin=stdin)
    assert done.returncode == 2
    assert re.fullmatch(rf"specdec: {words}\n", done.stderr), done.stderr


@pytest.mark.parametrize("command", ["generate x", "pull"])
def test_models_that_cannot_be_loaded(shell: Shell, tmp_path: Path, command: str) -> None:
    flag = "--model" if command == "generate x" else ""
    check_refusal(shell, f"{command} {flag} ./missing", "no model './missing'", 3)
    folder = make_folder(tmp_path / "unsafe")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    check_refusal(shell, f"{command} {flag} {folder}", "can execute code on load", 3)
    truncated = make_folder(tmp_path / "truncated")
    add_weights(truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    check_refusal(shell, f"{command} {flag} {truncated}", "is truncated or damaged", 3)


def test_what_only_the_engine_can_refuse(shell: Shell) -> None:
    generate = f"generate --model {shell.model}"
    check_refusal(shell, f"{generate} {'x' * 600}", "the context holds 512", 2)
    check_refusal(shell, f"{generate} --drafter nope x", "unknown drafter 'nope'; choose from", 2)


# --- help and facts ---


def test_help_and_version(shell: Shell) -> None:
    bare, bench, help_ = shell.run(), shell.run("bench"), shell.run("--help")
    assert (bare.returncode, bench.returncode, help_.returncode) == (2, 2, 0)
    assert bare.stderr.startswith("Usage: specdec [OPTIONS] COMMAND")
    assert bare.stderr.count("\n") > 10
    assert help_.stdout == bare.stderr
    assert bench.stderr.startswith("Usage: specdec bench [OPTIONS] COMMAND")
    assert "latency" in bench.stderr
    assert re.fullmatch(r"specdec \d+\.\d+\.\d+\S*\n", shell.run("--version").stdout)


def test_a_prediction_that_no_drafter_uses_is_told(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abc")
    asked = ("generate", "--model", str(shell.model), *QUICK, PROMPT, "--prediction")
    drafters = ("suffix", "suffix,prediction", "auto")
    done = [shell.run(*asked, str(tmp_path / "text"), "--drafter", name) for name in drafters]
    assert [each.returncode for each in done] == [0, 0, 0]
    assert ["--prediction is of no use" in each.stderr for each in done] == [True, False, False]


def test_info(shell: Shell) -> None:
    facts = json.loads(shell.run("info", "--json").stdout)
    assert facts["devices"][0] == "cpu"
    assert {"none", "ngram"} <= set(facts["drafters"])
    assert facts["auto_weights"].endswith((" else bf16", " else fp32"))
    assert facts["cache"] == str(shell.home)
    assert {"specdec-server", "torch", "python"} <= set(facts["versions"])


def test_pull_of_a_local_folder_prints_it(shell: Shell) -> None:
    done = shell.run("pull", str(shell.model))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{shell.model}\n", "")


# --- generate ---


def test_sources_and_drafters_give_one_answer(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": PROMPT}]))
    answer = shell.generate(PROMPT)
    assert {"text", "token_ids", "finish_reason", "usage", "metrics", "timings"} <= set(answer)
    num_tokens = len(answer["token_ids"])
    assert answer["finish_reason"] == ("length" if num_tokens == 40 else "stop")
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["usage"]["prompt_tokens"] == len(f"user:{PROMPT}\nassistant:")
    speculation = answer["metrics"]["speculative_decoding"]
    assert speculation["num_draft_tokens"] > 0
    assert speculation["num_accepted_draft_tokens"] > 0
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    assert 0 < speculation["draft_acceptance_rate"] <= 1
    assert speculation["mean_acceptance_length"] == pytest.approx(
        num_tokens / speculation["num_spec_steps"], abs=1e-4
    )
    assert answer["timings"]["ttft_s"] >= 0
    assert answer["timings"]["decode_tokens_per_second"] > 0

    plain = shell.generate(PROMPT, "--drafter", "none")
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    others = [
        plain,
        shell.generate(PROMPT, "--control", "adaptive", "--latency-weight", "0.5"),
        shell.generate("--file", str(tmp_path / "prompt.txt")),
        shell.generate("-", stdin=PROMPT),
        shell.generate("--messages", str(tmp_path / "chat.json")),
    ]
    assert [other["token_ids"] for other in others] == [answer["token_ids"]] * len(others)
    assert {other["text"] for other in others} == {answer["text"]}


def test_raw_and_seed(shell: Shell) -> None:
    drawn = [shell.generate("--raw", PROMPT, "--temperature", "1", "--seed", "5") for _ in "ab"]
    assert drawn[0]["usage"]["prompt_tokens"] == len(PROMPT), "no chat template"
    assert drawn[0]["token_ids"] == drawn[1]["token_ids"]
    assert drawn[0]["seed"] == 5


def test_backends_and_precisions(shell: Shell) -> None:
    """In fp32 both backends choose the same tokens: the toy's logits lie far enough apart."""
    try:
        native_library.load(compiled_native())
    except native_library.NativeUnavailable as reason:
        pytest.skip(str(reason))
    answers = [shell.generate(PROMPT, "--backend", name) for name in ("native", "torch")]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    rounded = [
        shell.generate(PROMPT, "--weights", "int4", "--kv", "int8", "--drafter", drafter)
        for drafter in ("none", "ngram")
    ]
    assert rounded[0]["token_ids"] == rounded[1]["token_ids"]


def test_without_a_compiler_it_is_pytorch(shell: Shell) -> None:
    """In one line of warning; what PyTorch cannot do either is refused."""
    (shell.home / "native").unlink()
    generate = ("generate", "--model", str(shell.model), *QUICK, "--raw", PROMPT)
    done = shell.run(*generate, CXX="no-such-compiler")
    assert done.returncode == 0 and done.stdout
    *_, warning, chosen = done.stderr.splitlines()
    assert re.fullmatch("specdec: using PyTorch's .*no-such-compiler.*", warning)
    assert re.fullmatch(r"chosen: drafter prediction,suffix; at most \d+ nodes a step", chosen)
    done = shell.run(*generate, "--kv", "int8", CXX="no-such-compiler")
    assert (done.returncode, done.stdout) == (2, "")
    *_, last = done.stderr.splitlines()
    assert re.fullmatch("specdec: --kv int8 needs the native .*no-such-compiler.*auto", last)


def test_accepted_draft_tokens_are_coloured_on_a_terminal(shell: Shell) -> None:
    arguments = ("generate", "--model", str(shell.model), *QUICK, PROMPT)
    piped = shell.run(*arguments).stdout
    coloured = shell.on_terminal(*arguments)
    without = shell.on_terminal(*arguments, NO_COLOR="1")
    assert "\x1b[32;4m" in coloured
    assert "\x1b" not in piped + without
    text, _, summary = ESCAPE.sub("", coloured).rstrip("\n").rpartition("\n")
    assert "drafts accepted" in summary
    assert f"{text}\n" == without == piped


@pytest.mark.parametrize("arguments", ["--help", "info", "generate"])
def test_a_closed_pipe_is_quiet(shell: Shell, arguments: str) -> None:
    more = ("--model", str(shell.model), *QUICK, PROMPT) if arguments == "generate" else ()
    ours, theirs = os.pipe()
    os.close(ours)  # nobody will read
    done = subprocess.run(
        [*COMMAND, arguments, *more],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env=shell.environment(),
    )
    os.close(theirs)
    assert without_notice(done.stderr) == ""
    assert done.returncode in (1, 141), "by typer, or by us when the buffer is written at the end"
