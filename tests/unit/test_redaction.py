"""Which words of a command line are secret, and how they are written down."""

import base64

import pytest
from secret_kinds import KINDS

from mindspeed_autoparallel.redaction import is_secret_variable, masked_text, masked_words, secret_values, with_encoded
from mindspeed_autoparallel.runtime.launch.children import secret_variables


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_secret_is_masked_in_words_texts_and_base64(kind):
    flag, secret = KINDS[kind]
    argv = ["train.py", flag, secret, "--lr", "1e-4", f"{flag}={secret}", f"http://me:{secret}@host/x"]
    assert secret not in " ".join(masked_words(argv))
    assert masked_words(argv)[3:5] == ["--lr", "1e-4"]
    values = secret_values(argv)
    log = [
        f"using {secret}!",
        base64.b64encode(secret.encode()).decode(),
        base64.b64encode(f"me:{secret}".encode()).decode(),
    ]
    for line in log:
        masked = masked_text(line, values)
        assert "***" in masked
        assert len(masked) < len(line)
        assert secret not in masked


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_in_the_environment(kind):
    flag, secret = KINDS[kind]
    assert secret in secret_variables(
        {"OBS_" + flag.lstrip("-").replace("-", "_").upper(): secret, "PWD": "/home/me/work"}
    )
    assert "/home/me/work" not in secret_variables({"PWD": "/home/me/work"})


def test_a_password_with_an_at_sign_and_settings_without_dashes_are_masked():
    argv = ["train.py", "https://me:hun@ter2@host/x", "wandb.api_key=hunter3", "HF_TOKEN=hunter4", "trainer.seed=3"]
    assert masked_words(argv) == [
        *("train.py", "https://me:***@host/x", "wandb.api_key=***", "HF_TOKEN=***", "trainer.seed=3")
    ]


@pytest.mark.parametrize(
    "word", ["sk-learn", "hf_checkpoints", "hf_to_mm", "task-1", "AKIRA", "eyJ", "npm_run", "LTAI"]
)
def test_names_that_look_alike_stay(word):
    assert masked_words(["train.py", "--note", word, f"--save=/data/{word}"]) == [
        "train.py",
        "--note",
        word,
        f"--save=/data/{word}",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "--hf-token",
        "--token",
        "--wandb_api_key",
        "--wandb-key",
        "--db-password",
        "--client-secret",
        "--aws-access-key",
        "--apikey",
    ],
)
def test_values_of_secret_flags_are_masked_in_both_spellings(name):
    argv = ["train.py", name, "hunter2", "--lr", "1", f"{name}=hunter3"]
    assert masked_words(argv) == ["train.py", name, "***", "--lr", "1", f"{name}=***"]
    assert secret_values(argv) == with_encoded({"hunter2", "hunter3"})


@pytest.mark.parametrize(
    "name",
    [
        "--moe-token-dispatcher-type",
        "--fim-eod-token",
        "--tokenizer-type",
        "--linear-num-key-heads",
        "--kv-channels",
        "--calculate-per-token-loss",
        "--apply-query-key-layer-scaling",
        "--rl-skip-bos-token",
        "--sft-tokenizer-prompt-format",
    ],
)
def test_megatrons_own_tokens_and_keys_stay(name):
    assert masked_words(["train.py", name, "alltoall"]) == ["train.py", name, "alltoall"]
    assert not secret_values(["train.py", name, "alltoall"])


def test_passwords_in_addresses_are_masked():
    argv = ["train.py", "--save", "s3://me:hunter2@host/path", "--log=http://a:b@c"]
    assert masked_words(argv) == ["train.py", "--save", "s3://me:***@host/path", "--log=http://a:***@c"]
    assert secret_values(argv) == with_encoded({"hunter2", "b"})


def test_text_loses_every_value_the_longest_first():
    assert masked_text("abc and ab", {"ab", "abc"}) == "*** and ***"
    assert masked_text("nothing", ()) == "nothing"


def test_switches_without_a_value_hide_nothing_else():
    assert masked_words(["x.py", "--use-secret", "--lr", "1"]) == ["x.py", "--use-secret", "--lr", "1"]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("MEGATRON_API_KEY", True),
        ("NPU_AUTH_TOKEN", True),
        ("PYTORCH_SECRET", True),
        ("GITHUB_TOKEN", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("PYTHONPATH", False),
        ("NCCL_IB_GID_INDEX", False),
    ],
)
def test_secret_variables_are_recognised_by_their_names(name, secret):
    assert is_secret_variable(name) is secret
