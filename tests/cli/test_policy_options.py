"""Options of policies, and how they become settings."""

import argparse

import pytest

from branchline.cli.options import add_engine_options, engine_settings


def parse(*words):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_settings(parser.parse_args(words))


def test_weights_of_tenants_may_be_given_several_times():
    settings = parse("--policy", "fair", "--tenant-weight", "ann=2", "--tenant-weight", "a=b=0.5")
    assert settings["tenant_weights"] == (("ann", 2.0), ("a=b", 0.5))
    assert settings["policy"] == "fair"
    assert "tenant_weights" not in parse()


@pytest.mark.parametrize("words", ["ann", "ann=", "ann=much"])
def test_a_weight_is_a_number(words, capsys):
    with pytest.raises(SystemExit):
        parse("--tenant-weight", words)
    assert "is not NAME=WEIGHT" in capsys.readouterr().err


def test_the_others_have_the_names_of_their_fields():
    words = "--overtake-tokens 9 --preemption-gap 3 --policy-seed 4 --eviction slru --pin-share 0.5 --max-queued-tokens 70"
    expected = {
        "overtake_tokens": 9, "preemption_gap": 3, "policy_seed": 4, "eviction": "slru", "pin_share": 0.5,
        "max_queued_tokens": 70,
    }  # fmt: skip
    assert parse(*words.split()).items() >= expected.items()
