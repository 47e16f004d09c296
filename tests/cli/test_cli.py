"""The command line as a user meets it."""

import json
import os
import subprocess
import sys

import pytest

from branchline.base.errors import ConfigError, EngineDead, InvalidRequest, ModelError
from branchline.cli.main import exit_code, main


def branchline(*arguments: str, text: str = "", timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "branchline.cli.main", *arguments], capture_output=True, text=True, timeout=timeout,
        check=False, input=text, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip


def test_generate_names_paris(default_checkpoint):
    done = branchline("generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0")
    assert "Paris" in done.stdout
    assert done.returncode == 0


def test_generate_as_json_from_standard_input(default_checkpoint):
    done = branchline("generate", "-", "--json", "--max-tokens", "4", "--temperature", "0", text="The sky is")
    answer = json.loads(done.stdout)
    assert answer["completion_tokens"] == 4
    assert answer["prompt_tokens"] == 3
    assert answer["finish_reason"] == "length"


def test_chat_holds_a_conversation(default_checkpoint):
    done = branchline("chat", "--max-tokens", "5", "--temperature", "0", text="Hello\n/new\nHello\n/quit\n")
    assert done.returncode == 0, done.stderr
    answers = [line.lstrip("> ") for line in done.stdout.splitlines() if line.startswith("> ")]
    assert answers[0] == answers[1] != ""


def test_doctor_tells_what_there_is(default_checkpoint):
    done = branchline("doctor")
    assert done.returncode == 0
    for word in ("processor", "memory", "executor", "SmolLM2", "KV cache", "context"):
        assert word in done.stdout


def test_a_missing_model_is_one_sentence_and_exit_code_78():
    done = branchline("generate", "x", "--model", "/nowhere/m.gguf")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "m.gguf" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve", "--no-such-flag"], ["generate"]])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: branchline" in capsys.readouterr().err


def test_every_kind_of_error_has_its_exit_code():
    assert [exit_code(error) for error in (ModelError("x"), ConfigError("x"), InvalidRequest("x"), EngineDead("x"))] == [
        78, 78, 1, 70,
    ]  # fmt: skip


def test_every_setting_has_a_flag_and_every_flag_a_setting():
    import dataclasses

    from branchline.base.config import EngineConfig, ServerConfig
    from branchline.cli.options import ENGINE_HELP, SERVER_HELP

    own = {"model", "prefix_cache", "overlap", "api_keys", "admin_keys", "allow_unauthenticated",
           "journal_text", "tenant_weights"}  # fmt: skip
    fields = {field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    assert fields - own == set(ENGINE_HELP) | set(SERVER_HELP)
    assert len(fields) < 60
