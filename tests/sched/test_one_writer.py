"""`sched.lifecycle` alone assigns to attributes of a sequence (architecture decision 5)."""

import ast
from pathlib import Path

import branchline
from branchline.sched.lifecycle import TRANSITIONS, Seq, State, Verb

PACKAGE = Path(branchline.__file__).parent
HOLDERS = ("sched", "engine")
"""Packages that ever see a sequence."""


def assigned_attributes(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id != "self":
                yield target.attr, target.lineno


def test_nobody_else_writes_to_a_sequence():
    fields = set(Seq.__slots__)
    poked = [
        f"{path.relative_to(PACKAGE)}:{line} writes {name}"
        for holder in HOLDERS
        for path in (PACKAGE / holder).rglob("*.py")
        for name, line in assigned_attributes(path)
        if name in fields
    ]
    assert poked == []


def test_the_table_of_transitions_is_the_picture():
    assert {(source.name, verb.name, target.name) for (source, verb), target in TRANSITIONS.items()} == {
        ("WAITING", "ADMIT", "RUNNING"),
        ("RUNNING", "RETRACT", "WAITING"),
        ("WAITING", "FINISH", "FINISHED"),
        ("RUNNING", "FINISH", "FINISHED"),
    }
    assert len(State) * len(Verb) > len(TRANSITIONS)
