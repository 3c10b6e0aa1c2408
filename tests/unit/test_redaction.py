"""Which words of a command line are secret, and how they are written down."""

import pytest

from mindspeed_autoparallel.redaction import is_secret_variable, masked_text, masked_words, secret_values


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
    assert secret_values(argv) == {"hunter2", "hunter3"}


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
    assert secret_values(argv) == {"hunter2", "b"}


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
def test_variables_are_told_by_their_names(name, secret):
    assert is_secret_variable(name) is secret
