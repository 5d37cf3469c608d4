"""Synthetic chat tasks whose answers mostly copy from the question.

Copying is what n-gram and predicted-text drafting live on, and what a model this small can
learn: repeat a text, rename an identifier, turn records into JSON, change one field, count.
"""

import ast
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_training.corpus import Document

Task = tuple[str, str]  # question, answer

NAMES = """Ada Ben Clara David Emma Frank Grace Henry Iris Jack Kate Liam Maria Noah Olive Paul
Quinn Rosa Sam Tara Umar Vera Will Xena Yara Zoe Anne Mary John Jane""".split()
CITIES = """Paris Rome Berlin Madrid Oslo Vienna Dublin London Lisbon Prague Athens Cairo Delhi
Tokyo Lima Quito Boston Chicago Austin Denver""".split()
THINGS = """apple lamp chair table book pen cup plate bag coat hat shoe ring clock key box door
window candle mirror basket ladder hammer bottle spoon""".split()
COLOURS = "red blue green black white yellow brown grey pink purple".split()
IDENTIFIERS = """total count result value items data index name size offset buffer key line text
node left right first last start stop width height depth limit step state source target path
entry record row column field number amount price score weight rate label title word letter
message request response handler worker queue stack cache table tree graph point vector""".split()
FIELDS: dict[str, Callable[[random.Random], str | int]] = {
    "name": lambda rng: rng.choice(NAMES),
    "city": lambda rng: rng.choice(CITIES),
    "item": lambda rng: rng.choice(THINGS),
    "colour": lambda rng: rng.choice(COLOURS),
    "age": lambda rng: rng.randint(18, 90),
    "price": lambda rng: rng.randint(1, 99),
    "count": lambda rng: rng.randint(1, 20),
    "id": lambda rng: rng.randint(100, 999),
}
FUNCTION = """def {f}({a}, {b}):
    {c} = {a} {op} {b}
    if {c} > {n}:
        return {c}
    return {b}
"""
LOOP = """def {f}({a}):
    {b} = {n}
    for {c} in {a}:
        {b} {op}= {c}
    return {b}
"""
CLASS = """class {F}:
    def __init__(self, {a}, {b}={n}):
        self.{a} = {a}
        self.{b} = {b}

    def {f}(self):
        return self.{a} {op} self.{b}
"""


@dataclass(frozen=True)
class Passages:
    """Raw material for tasks, cut from documents of one split."""

    sentences: list[str]
    functions: list[str]


def collect_passages(documents: list[Document]) -> Passages:
    sentences, functions = [], []
    for document in documents:
        if document.kind == "code":
            functions += [f for f in functions_of(document.text) if 60 <= len(f) <= 420]
        else:
            text = re.sub(r"(?m)^\d+:\d+ ", "", document.text)
            found = re.findall(r"(?<=[.!?]\s)[A-Z][^.!?`|*]{20,240}[.!?](?=\s)", text)
            sentences += [" ".join(s.split()) for s in found]
    return Passages(sentences, functions)


def functions_of(source: str) -> Iterator[str]:
    """Top-level functions of a module, as written."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield ast.get_source_segment(source, node) or ""


def repeat(rng: random.Random, passages: Passages) -> Task:
    sentences = rng.sample(passages.sentences, rng.randint(1, 3))
    text = " ".join(sentences)[:500]
    return f"{rng.choice(REPEAT_WORDS)}\n\n{text}", text


REPEAT_WORDS = (
    "Repeat this text exactly:",
    "Copy the following text:",
    "Write this again, word for word:",
    "Say the same thing again:",
)


def repeat_code(rng: random.Random, passages: Passages) -> Task:
    code = snippet(rng, passages)
    return f"Repeat this code exactly:\n\n{code}", code


def rename(rng: random.Random, passages: Passages) -> Task:
    code = snippet(rng, passages)
    names = [n for n in re.findall(r"\b[a-z_]{3,}\b", code) if n not in KEYWORDS]
    fresh = [n for n in IDENTIFIERS if n not in names]
    if not names:
        return repeat_code(rng, passages)
    old, new = rng.choice(names), rng.choice(fresh)
    answer = re.sub(rf"\b{old}\b", new, code)
    return f"Rename `{old}` to `{new}` in this code:\n\n{code}", answer


KEYWORDS = frozenset(
    """def for return class self from import not and with try except raise else elif while lambda
    yield pass break continue assert del global isinstance len print range str int the""".split()
)


def snippet(rng: random.Random, passages: Passages) -> str:
    """A real function half of the time, else one made from a pattern."""
    if rng.random() < 0.5:
        return rng.choice(passages.functions).rstrip()
    a, b, c, f, g = rng.sample(IDENTIFIERS, 5)
    pattern = rng.choice((FUNCTION, LOOP, CLASS))
    parts = {"a": a, "b": b, "c": c, "f": f"{f}_{g}", "F": (f + " " + g).title().replace(" ", "")}
    return pattern.format(op=rng.choice("+-*"), n=rng.randint(0, 99), **parts).rstrip()


def records(rng: random.Random) -> list[dict[str, str | int]]:
    fields = rng.sample(sorted(FIELDS), rng.randint(2, 4))
    return [{f: FIELDS[f](rng) for f in fields} for _ in range(rng.randint(1, 5))]


def to_json(rows: list[dict[str, str | int]]) -> str:
    return "[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]"


def table_to_json(rng: random.Random, _: Passages) -> Task:
    rows = records(rng)
    lines = [",".join(rows[0])] + [",".join(map(str, row.values())) for row in rows]
    return "Turn these rows into JSON:\n\n" + "\n".join(lines), to_json(rows)


def lines_to_json(rng: random.Random, _: Passages) -> Task:
    rows = records(rng)
    lines = ["; ".join(f"{k}: {v}" for k, v in row.items()) for row in rows]
    return "Write these records as JSON:\n\n" + "\n".join(lines), to_json(rows)


def change_field(rng: random.Random, _: Passages) -> Task:
    rows = records(rng)
    number, field = rng.randrange(len(rows)), rng.choice(list(rows[0]))
    value = FIELDS[field](rng)
    changed = [dict(row) for row in rows]
    changed[number][field] = value
    question = f"Set {field} of record {number + 1} to {value} in this JSON:\n\n{to_json(rows)}"
    return question, to_json(changed)


def list_field(rng: random.Random, _: Passages) -> Task:
    rows = records(rng)
    field = rng.choice(list(rows[0]))
    answer = "\n".join(f"- {row[field]}" for row in rows)
    return f"List every {field} in this JSON:\n\n{to_json(rows)}", answer


def count(rng: random.Random, _: Passages) -> Task:
    things = rng.sample(THINGS, rng.randint(2, 9))
    numbered = "\n".join(f"{i}. {thing}" for i, thing in enumerate(things, 1))
    question = f"Number and count these things: {', '.join(things)}"
    return question, f"{numbered}\nThere are {len(things)} things."


GENERATORS: dict[Callable[[random.Random, Passages], Task], float] = {
    repeat: 3.0,
    repeat_code: 1.5,
    rename: 3.0,
    table_to_json: 1.5,
    lines_to_json: 1.5,
    change_field: 1.5,
    list_field: 0.7,
    count: 0.7,
}


def generate(passages: Passages, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """`number` tasks as (generator's name, question, answer)."""
    rng = random.Random(seed)
    for generator in rng.choices(list(GENERATORS), weights=list(GENERATORS.values()), k=number):
        yield generator.__name__, *generator(rng, passages)
