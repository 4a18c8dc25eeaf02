"""What a value can be, as far as an annotation or an assignment says it.

Owns the words of an op's schema, for parameters and results, and the guesses from `__init__`. A value of which nothing
is known stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

TENSOR = "torch.Tensor"
_WORDS = ("int", "float", "bool", "str", "torch.dtype", "torch.device", TENSOR)
_LISTS = ("list[int]", "list[float]", "list[bool]", f"list[{TENSOR}]")
_FACTORIES = re.compile(r"torch\.(ones|zeros|empty|full|tensor|arange|rand|randn|eye|linspace|cat|stack)(_like)?$")
_CONVERSIONS = {"int": "int", "len": "int", "float": "float", "bool": "bool", "str": "str", "round": "int"}


@dataclass(frozen=True, slots=True)
class Kinds:
    """What a value can be: words of a schema and `None`; or the code that always stands for it.

    Attributes:
        words: The words; empty when something about it is not known.
        inline: Code that can stand in its place, because it names nothing of the instance.
    """

    words: frozenset[str] = frozenset()
    inline: str | None = None

    @classmethod
    def of_annotation(cls, annotation: str | None) -> Kinds:
        """What an annotation in the words of a schema says."""
        return cls(frozenset() if annotation is None else frozenset(annotation.split(" | ")))

    def joined(self, other: Kinds) -> Kinds:
        """What it can be if either assignment ran."""
        if self.inline is not None or other.inline is not None:
            return self if self.inline == other.inline else Kinds()
        return Kinds(self.words | other.words if self.words and other.words else frozenset())

    @property
    def annotation(self) -> str | None:
        """The annotation for a schema; None where there is none."""
        words = sorted(self.words - {"None"})
        words = ["float"] if words == ["float", "int"] else words
        if len(words) != 1 or words[0] not in (*_WORDS, *_LISTS):
            return None
        return words[0] + (" | None" if "None" in self.words else "")


def normalised(annotation: cst.BaseExpression) -> str | None:
    """An annotation in the words of a schema (`torch.Tensor | None`); None if a schema has no word for it."""
    text = re.sub(r"\s+", "", cst.Module([]).code_for_node(annotation)).strip("\"'")
    parts = _alternatives(text)
    words = []
    for part in parts:
        part = re.sub(r"(?<![\w.])Tensor\b", TENSOR, part.replace("torch.nn.Parameter", TENSOR))
        part = re.sub(r"^(typing\.)?(List|Sequence|list)\[", "list[", part)
        if part not in (*_WORDS, *_LISTS, "None"):
            return None
        words.append(part)
    ordered = [word for word in dict.fromkeys(words) if word != "None"]
    return " | ".join([*ordered, *(["None"] if "None" in words else [])]) or None


def _alternatives(text: str) -> list[str]:
    """The members of `A | B`, `Optional[A]` and `Union[A, B]`."""
    inside = re.fullmatch(r"(?:typing\.)?(Optional|Union)\[(.*)\]", text)
    if inside is not None:
        more = ["None"] if inside[1] == "Optional" else []
        return [part for each in split_at(inside[2], ",") for part in _alternatives(each)] + more
    parts = split_at(text, "|")
    return parts if len(parts) == 1 else [part for each in parts for part in _alternatives(each)]


def split_at(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]


def kinds_of(value: cst.BaseExpression, given: Mapping[str, str | None], known: Mapping[str, Kinds]) -> Kinds:
    """What an expression in `__init__` can be.

    Args:
        value: The expression.
        given: Annotations of the parameters of `__init__`.
        known: What was assigned before, by name; attributes as `self.name`.
    """
    text = cst.Module([]).code_for_node(value)
    if text in known:
        return known[text]
    if isinstance(value, cst.Name) and value.value in given:
        return Kinds.of_annotation(given[value.value])
    word = _literal(value, text)
    if word is not None:
        return Kinds(frozenset((word,)))
    if isinstance(value, cst.IfExp):
        return kinds_of(value.body, given, known).joined(kinds_of(value.orelse, given, known))
    if isinstance(value, (cst.Comparison, cst.UnaryOperation)):
        inner = value.expression if isinstance(value, cst.UnaryOperation) else None
        negated = inner is not None and not isinstance(value.operator, cst.Not)  # type: ignore[union-attr]
        return kinds_of(inner, given, known) if negated and inner is not None else Kinds(frozenset(("bool",)))
    if isinstance(value, cst.BinaryOperation):
        return _arithmetic(value, given, known)
    if isinstance(value, cst.Call):
        return _call(value)
    if (
        isinstance(value, cst.Attribute)
        and re.match(r"[A-Za-z_]\w*", text)
        and text.split(".")[0] not in ({*given} | {"self"} | {name.split(".")[0] for name in known})
    ):
        return Kinds(inline=text)
    return Kinds()


def _literal(value: cst.BaseExpression, text: str) -> str | None:
    if text in ("True", "False"):
        return "bool"
    if text == "None":
        return "None"
    for node, word in ((cst.Integer, "int"), (cst.Float, "float"), (cst.SimpleString, "str")):
        if isinstance(value, node):
            return word
    return None


def _arithmetic(value: cst.BinaryOperation, given: Mapping[str, str | None], known: Mapping[str, Kinds]) -> Kinds:
    sides = [kinds_of(side, given, known).annotation for side in (value.left, value.right)]
    if not all(side in ("int", "float", "bool") for side in sides):
        return Kinds()
    whole = sides == ["int", "int"] and not isinstance(value.operator, (cst.Divide, cst.Power))
    return Kinds(frozenset(("int" if whole else "float",)))


def _call(value: cst.Call) -> Kinds:
    called = cst.Module([]).code_for_node(value.func)
    if called in _CONVERSIONS:
        return Kinds(frozenset((_CONVERSIONS[called],)))
    if called.rpartition(".")[2] == "Parameter" or _FACTORIES.match(called):
        return Kinds(frozenset((TENSOR,)))
    return Kinds()


def returned(annotation: cst.BaseExpression) -> list[str] | None:
    """The members of a return annotation in the words of a schema; None if one has none."""
    found = []
    for part in split_at("".join(cst.Module([]).code_for_node(annotation).split()).strip("\"'"), "|"):
        inside = part.partition("[")[2].rpartition("]")[0]
        if part.lower().startswith("tuple["):
            members = [normalised(cst.parse_expression(each)) for each in split_at(inside, ",")]
            if any(member not in (TENSOR, f"{TENSOR} | None") for member in members):
                return None
            found.append(f"tuple[{', '.join(map(str, members))}]")
        elif part.startswith("Union["):
            return returned(cst.parse_expression(" | ".join(split_at(inside, ","))))
        elif normalised(cst.parse_expression(part)) == TENSOR:
            found.append(TENSOR)
        else:
            return None
    return found


def result_of(counts: set[int | None], returns: Sequence[str] | None = None, there: bool = False) -> str:
    """The annotation of a result, from how many values are returned, else from what was written."""
    count = next(iter(counts)) if len(counts) == 1 else None
    if count is None and returns and len(returns) == 2:
        tuples = [each for each in returns if each.startswith("tuple")]
        return tuples[0] if there and tuples else TENSOR
    return TENSOR if count in (None, 1, -1) else f"tuple[{', '.join([TENSOR] * (count or 1))}]"
