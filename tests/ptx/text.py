"""PTX text as programs for the machine: every instruction of a kernel as numbers.

What the machine does not know is an error that names it. Registers, constants and special registers share one
numbering; a register is there only if an instruction names it. Shared variables have gaps between them, so that an
access that leaves one is seen.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

INSTRUCTION = np.dtype(
    [
        ("operation", np.int32),
        ("kind", np.int32),
        ("d", np.int32, 4),
        ("s", np.int32, 4),
        ("offset", np.int64),
        *(
            (name, np.int32)
            for name in (
                *("guard", "negated", "target", "place", "space", "size", "count", "extends"),
                *("strength", "scope", "reads", "writes", "proxy", "unused"),
            )
        ),
    ]
)
"""As in ``operations.h``."""

Kind = IntEnum(
    "Kind",
    "COMPUTE BRANCH END LOAD STORE ATOMIC FENCE BARRIER WARP_BARRIER SHUFFLE VOTE PARAMETER WHERE_SHARED "
    "WHERE_GLOBAL NOTHING PROXY_FENCE CLOCK SLEEP TRAP MULTI_LOAD MULTI_STORE MULTI_ATOMIC",
    start=0,
)
"""As in ``launch.h``."""

SHARED_WINDOW = 1 << 56
GAP = 64  # bytes between two shared variables, and before the first

SPACES = {"global": 0, "shared": 1, "generic": 2}
MULTICAST, READ_ONLY_CACHE, ADDRESS = 1, 2, 3
"""Proxies; another address of the same bytes has another number, from the last one on."""
WEAK, STRONG, RELEASE, ACQUIRE, BOTH = range(5)
SCOPES = {"cta": 0, "gpu": 1, "sys": 2, "gl": 1}
SEMANTICS = {"relaxed": STRONG, "acquire": ACQUIRE, "release": RELEASE, "acq_rel": BOTH}
CACHED = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}  # hints that change no result

LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
GUARDED = re.compile(r"@(!?)(%[\w$.]+)\s+")
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?[^{;]*\{")
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\d+)\s+(?:\.ptr\S*\s+)?([\w$]+)(?:\[(\d+)\])?"
)
SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\d+)\s+([\w$]+)((?:\[\d+\])*)\s*;")
REGISTERS = re.compile(r"\.reg\s+\.\w+\s+(.*)", re.S)


class PtxError(Exception):
    """The text has something that the machine does not know."""


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter, or a shared variable: where it lies."""

    name: str
    base: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    name: str
    code: NDArray[np.void]
    texts: tuple[str, ...]  # each instruction as it stands in the text, and its line there
    lines: tuple[int, ...]
    registers: int
    constants: tuple[tuple[int, int], ...]  # a special's value says which
    specials: tuple[tuple[int, int], ...]
    parameters: tuple[Part, ...]
    variables: tuple[Part, ...]

    def without(self, place: int) -> Program:
        """The kernel with nothing in place of an instruction."""
        code = self.code.copy()
        code["kind"][place] = Kind.NOTHING
        return replace(self, code=code)

    def plain(self, place: int) -> Program:
        """The kernel with a load, a sum and a store in place of an atomic operation, as far as races see it."""
        code = self.code.copy()
        code["strength"][place] = WEAK
        return replace(self, code=code)

    def places(self, *kinds: Kind) -> list[int]:
        return np.flatnonzero(np.isin(self.code["kind"], kinds)).tolist()


@dataclass(frozen=True, slots=True)
class Names:
    """Numbers of what the machine can do; negative for what it cannot."""

    operation: Callable[[str], int]
    atomic: Callable[[str], int]
    special: Callable[[str], int]
    reduction: Callable[[str], int]


def programs(text: str, names: Names) -> dict[str, Program]:
    """All kernels of a module.

    Raises
    ------
    PtxError
        An instruction, operand or declaration is not known.
    """
    clean = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S)
    entries = list(ENTRY.finditer(clean))
    first = entries[0].start() if entries else len(clean)
    shared = _shared(clean[:first])
    found = {}
    for entry in entries:
        end = _closing(clean, entry.end())
        reader = _Reader(entry[1], names, _parameters(entry[2] or ""), dict(shared))
        found[entry[1]] = reader.read(clean[entry.end() : end], clean.count("\n", 0, entry.end()) + 1)
    return found


def _closing(text: str, start: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise PtxError("the text ends within a kernel")


def _parameters(text: str) -> tuple[Part, ...]:
    parts, end = [], 0
    for align, kind, name, count in (found.groups() for found in PARAMETER.finditer(text)):
        size = int(kind[1:]) // 8
        end += -end % int(align or size)
        parts.append(Part(name, end, size * int(count or 1)))
        end += size * int(count or 1)
    return tuple(parts)


def _shared(text: str) -> dict[str, tuple[int, int]]:
    """Alignment and bytes of each shared variable."""
    found = {}
    for align, kind, name, counts in (one.groups() for one in SHARED.finditer(text)):
        size = int(kind[1:]) // 8
        sizes = [int(count) for count in re.findall(r"\d+", counts)]
        found[name] = (int(align or size), size * int(np.prod(sizes, dtype=np.int64)))
    return found


def _statements(body: str, line: int) -> Iterator[tuple[int, str]]:
    """Each statement and its line; labels and braces of scopes are statements."""
    place = 0
    pieces = re.compile(r"\s*(?:([A-Za-z_$%][\w$]*:(?!:)|[{}])|([^;]*;))")
    ends = re.compile(r"\s*\Z")
    while not ends.match(body, place):
        found = pieces.match(body, place)
        if found is None:
            raise PtxError(f"line {line}: {body[place:].strip()[:60]!r} has no end")
        piece = found[1] or found[2]
        line += body.count("\n", place, found.end() - len(piece))
        yield line, " ".join(piece.removesuffix(";").split())
        line += piece.count("\n")
        place = found.end()


@dataclass(slots=True)
class _Reader:
    kernel: str
    names: Names
    parameters: tuple[Part, ...]
    shared: dict[str, tuple[int, int]]
    declared: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=lambda: {"_": 0})
    constants: dict[int, int] = field(default_factory=dict)
    specials: dict[int, int] = field(default_factory=dict)
    variables: dict[str, Part] = field(default_factory=dict)
    registers: int = 1  # the first takes results that nobody wants
    operations: dict[str, int] = field(default_factory=dict)

    def read(self, body: str, line: int) -> Program:
        rows: list[dict[str, object]] = []
        texts: list[str] = []
        lines: list[int] = []
        labels: dict[str, int] = {}
        branches: list[tuple[int, str]] = []
        for at, statement in _statements(body, line):
            if statement in "{}" or statement.startswith(".pragma"):
                continue
            if statement.endswith(":"):
                labels[statement[:-1]] = len(rows)
            elif statement.startswith("."):
                self.declare(statement, at)
            else:
                try:
                    row, label = self.instruction(statement)
                except PtxError as error:
                    raise PtxError(f"{self.kernel}, line {at}: {error}: {statement}") from None
                if label is not None:
                    branches.append((len(rows), label))
                rows.append(row)
                texts.append(statement)
                lines.append(at)
        rows.append({"kind": Kind.END})  # a body may end without ret
        texts.append("the end of the kernel")
        lines.append(line + body.count("\n"))
        code = np.zeros(len(rows), dtype=INSTRUCTION)
        code["guard"] = -1
        code["count"] = 1
        code["place"] = np.arange(len(rows))
        for place, row in enumerate(rows):
            target = code[place]
            for name, value in row.items():
                if isinstance(value, list):
                    target[name][: len(value)] = value
                else:
                    target[name] = value
        for place, label in branches:
            if label not in labels:
                raise PtxError(f"{self.kernel}: there is no label {label}")
            code["target"][place] = labels[label]
        return Program(
            self.kernel,
            code,
            tuple(texts),
            tuple(lines),
            self.registers,
            tuple((place, value) for value, place in self.constants.items()),
            tuple(self.specials.items()),
            self.parameters,
            tuple(self.variables.values()),
        )

    def declare(self, statement: str, line: int) -> None:
        if found := REGISTERS.fullmatch(statement):
            for name in found[1].split(","):
                prefix, _, count = name.strip().partition("<")
                self.declared[prefix] = int(count.rstrip("> ")) if count else -1
        elif statement.startswith(".shared"):
            self.shared.update(_shared(statement + ";"))
        else:
            raise PtxError(f"{self.kernel}, line {line}: unknown declaration {statement!r}")

    # ---- operands

    def place(self, text: str) -> int:
        known = self.places.get(text)
        if known is not None:
            return known
        if text.startswith("%") or text in self.declared:
            which = self.names.special(text)
            if which < 0:
                prefix = text.rstrip("0123456789")
                most = self.declared.get(prefix, 0)
                if text not in self.declared and not (text != prefix and int(text[len(prefix) :]) < most):
                    raise PtxError(f"{text} is not declared")
            else:
                self.specials[self.registers] = which
            self.places[text] = self.registers
            self.registers += 1
            return self.places[text]
        value = self.value(text) % (1 << 64)
        if value not in self.constants:
            self.constants[value] = self.registers
            self.registers += 1
        self.places[text] = self.constants[value]
        return self.places[text]

    def value(self, text: str) -> int:
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return int(text.rstrip("U"), 0 if "x" in text.lower() else 10)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return int(text[2:], 16)
        if text == "WARP_SZ":
            return 32
        if text in self.shared:
            return self.variable(text).base
        raise PtxError(f"unknown operand {text!r}")

    def variable(self, name: str) -> Part:
        if name not in self.variables:
            align, size = self.shared[name]
            end = max((part.base + part.size for part in self.variables.values()), default=0) + GAP
            self.variables[name] = Part(name, end + -end % max(align, 16), size)
        return self.variables[name]

    def address(self, text: str) -> tuple[int, int]:
        if not (text.startswith("[") and text.endswith("]")):
            raise PtxError(f"{text!r} is no address")
        base, sign, offset = re.fullmatch(
            r"([^+-]*|-?\d+)\s*(?:([+])\s*(-?\w+))?", text[1:-1].strip()
        ).groups()  # type: ignore[union-attr]
        return self.place(base.strip()), int(offset, 0) if sign else 0

    # ---- instructions

    def instruction(self, statement: str) -> tuple[dict[str, object], str | None]:
        row: dict[str, object] = {}
        if guard := GUARDED.match(statement):
            row.update(guard=self.place(guard[2]), negated=bool(guard[1]))
            statement = statement[guard.end() :]
        mnemonic, _, rest = statement.partition(" ")
        operands = [one.strip() for one in re.findall(r"(?:\{[^}]*\}|\[[^]]*\]|[^,{\[])+", rest)]
        if mnemonic in ("bra", "bra.uni"):
            return {**row, "kind": Kind.BRANCH}, operands[0]
        return {**row, **self.plain(mnemonic, operands)}, None

    def plain(self, mnemonic: str, operands: list[str]) -> dict[str, object]:
        first, *rest = mnemonic.split(".")
        special = {
            "ld": self.load,
            "st": self.store,
            "atom": self.atomic,
            "red": self.atomic,
            "membar": self.fence,
            "fence": self.fence,
            "bar": self.barrier,
            "barrier": self.barrier,
            "shfl": self.shuffle,
            "vote": self.vote,
            "cvta": self.convert_address,
            "isspacep": self.where,
            "multimem": self.multimem,
            "nanosleep": self.sleep,
        }.get(first)
        if mnemonic == "trap":
            return {"kind": Kind.TRAP}
        if mnemonic in ("ret", "ret.uni", "exit"):
            return {"kind": Kind.END}
        if special is not None:
            try:
                return special(mnemonic, rest, operands)
            except (KeyError, ValueError, IndexError, StopIteration):
                raise PtxError(f"unknown instruction {mnemonic}") from None
        if mnemonic == "mov.u64" and operands[1] == "%globaltimer":
            return {"kind": Kind.CLOCK, "d": [self.place(operands[0])]}
        if first == "mov" and operands[1].startswith("{"):
            parts = operands[1].strip("{}").split(",")
            return self.compute(f"join.{len(parts)}.b{rest[0][1:]}", [operands[0], *map(str.strip, parts)])
        if first == "mov" and operands[0].startswith("{"):
            places = self.registers_of(operands[0])
            row = self.compute(f"split.{len(places)}.b{rest[0][1:]}", ["_", operands[1]])
            return {**row, "d": places}
        return self.compute(mnemonic, operands)

    def compute(self, mnemonic: str, operands: list[str]) -> dict[str, object]:
        number = self.operations.get(mnemonic)
        if number is None:
            number = self.operations[mnemonic] = self.names.operation(mnemonic)
        if number < 0:
            raise PtxError(f"unknown instruction {mnemonic}")
        result, *others = [self.place(one) for one in operands]
        return {"kind": Kind.COMPUTE, "operation": number, "d": [result], "s": others}

    def access(self, rest: list[str], strength: int) -> dict[str, object]:
        """What the qualifiers of an access say; each of them must be known."""
        *qualifiers, kind = rest
        size = int(kind[1:]) // 8
        if kind[0] not in "busf" or size not in (1, 2, 4, 8):
            raise ValueError(kind)
        row: dict[str, object] = {
            "space": SPACES["generic"],
            "size": size,
            "extends": kind[0] == "s",
            "strength": strength,
            "scope": SCOPES["gpu"],
            "proxy": READ_ONLY_CACHE if "nc" in qualifiers else ADDRESS,
        }
        for one in qualifiers:
            if one in SPACES:
                row["space"] = SPACES[one]
            elif one in SEMANTICS:
                row["strength"] = SEMANTICS[one]
            elif one in SCOPES:
                row["scope"] = SCOPES[one]
            elif one == "volatile":
                row.update(strength=STRONG, scope=SCOPES["sys"])
            elif one in ("v2", "v4"):
                row["count"] = int(one[1])
            elif one not in CACHED and one != "weak":
                raise ValueError(one)
        return row

    def load(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        results = self.registers_of(operands[0])
        if rest[0] == "param":
            row = self.access(rest[1:], WEAK)
            base, _, offset = operands[1][1:-1].partition("+")
            part = next(one for one in self.parameters if one.name == base.strip())
            first, bytes_ = int(offset or 0), int(row["size"]) * len(results)  # type: ignore[call-overload]
            if first < 0 or first + bytes_ > part.size or (part.base + first) % bytes_:
                raise PtxError(f"{bytes_} bytes at {first} of a parameter of {part.size}")
            return {
                **row,
                "kind": Kind.PARAMETER,
                "offset": part.base + first,
                "count": len(results),
                "d": results,
            }
        base_place, offset_ = self.address(operands[1])
        row = self.access(rest, WEAK)
        if row.get("count", 1) != len(results):
            raise ValueError(mnemonic)
        return {**row, "kind": Kind.LOAD, "d": results, "s": [base_place], "offset": offset_, "reads": 1}

    def store(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        values = self.registers_of(operands[1])
        base, offset = self.address(operands[0])
        row = self.access(rest, WEAK)
        if row.get("count", 1) != len(values):
            raise ValueError(mnemonic)
        return {**row, "kind": Kind.STORE, "d": [base], "s": values, "offset": offset, "writes": 1}

    def atomic(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        result = "_" if mnemonic.startswith("red") else operands.pop(0)
        number = self.names.atomic(".".join(rest[-2:]))
        if number < 0:
            raise ValueError(mnemonic)
        base, offset = self.address(operands[0])
        others = [self.place(one) for one in operands[1:]]
        row = self.access([*rest[:-2], rest[-1]], STRONG)
        return {
            **row,
            "kind": Kind.ATOMIC,
            "operation": number,
            "d": [self.place(result)],
            "s": [base, *others, *([0] if len(others) == 1 else [])],
            "offset": offset,
            "reads": 1,
            "writes": 1,
        }

    def multimem(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        """One of the three instructions that multicast addresses take."""
        way, *rest = rest
        if way != "st":
            order = next(place for place, one in enumerate(rest) if one in ("add", "min", "max"))
            named = [one for one in rest[order:] if one not in ("v2", "v4")]
            operation = self.names.reduction(".".join(named))
            if operation < 0 or (rest[-1] not in ("f32", "f16x2", "bf16x2") and {"v2", "v4"} & {*rest}):
                raise ValueError(mnemonic)
            rest = [one for one in rest if one not in (rest[order], "acc::f32")]
            rest[-1] = {"f16x2": "b32", "bf16x2": "b32"}.get(rest[-1], rest[-1])
        row = self.access(rest, STRONG if way == "red" else WEAK)
        row["proxy"] = MULTICAST
        if way == "ld_reduce":
            results, (base, offset) = self.registers_of(operands[0]), self.address(operands[1])
            row.update(kind=Kind.MULTI_LOAD, operation=operation, d=results, s=[base], reads=1)
        else:
            results, (base, offset) = self.registers_of(operands[1]), self.address(operands[0])
            row.update(kind=Kind.MULTI_STORE, d=[base], s=results, writes=1)
            if way == "red":
                row.update(kind=Kind.MULTI_ATOMIC, operation=operation, reads=1)
            elif way != "st":
                raise ValueError(mnemonic)
        if row.get("count", 1) != len(results) or row["size"] not in (4, 8):
            raise ValueError(mnemonic)
        return {**row, "offset": offset}

    def sleep(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        if rest != ["u32"]:
            raise ValueError(mnemonic)
        return {"kind": Kind.SLEEP, "s": [self.place(operands[0])]}

    def registers_of(self, operand: str) -> list[int]:
        return [self.place(one.strip()) for one in operand.strip("{}").split(",")]

    def fence(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        if rest == ["proxy", "alias"]:
            return {"kind": Kind.PROXY_FENCE}
        if rest[:-1] not in ([], ["sc"], ["acq_rel"]):
            raise ValueError(mnemonic)
        return {"kind": Kind.FENCE, "scope": SCOPES[rest[-1]]}

    def barrier(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        if rest == ["warp", "sync"]:
            return {"kind": Kind.WARP_BARRIER, "s": [0, 0, 0, self.place(operands[0])]}
        rest = [one for one in rest if one != "cta"]
        if rest not in (["sync"], ["sync", "aligned"]):
            raise ValueError(mnemonic)
        aligned = mnemonic.startswith("bar.") or "aligned" in rest
        number = self.place(operands[0])
        count = self.place(operands[1]) if len(operands) > 1 else -1
        return {"kind": Kind.BARRIER, "s": [number, count], "extends": aligned}

    def shuffle(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        sync, way, kind = rest
        if (sync, kind) != ("sync", "b32"):
            raise ValueError(mnemonic)
        result, _, holds = operands[0].partition("|")
        return {
            "kind": Kind.SHUFFLE,
            "operation": ("up", "down", "bfly", "idx").index(way),
            "d": [self.place(result), self.place(holds or "_")],
            "s": [self.place(one) for one in operands[1:5]],
        }

    def vote(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        sync, way, kind = rest
        if (sync, kind) != ("sync", "b32" if way == "ballot" else "pred"):
            raise ValueError(mnemonic)
        return {
            "kind": Kind.VOTE,
            "operation": ("ballot", "all", "any", "uni").index(way),
            "d": [self.place(operands[0])],
            "s": [self.place(operands[1].removeprefix("!")), 0, 0, self.place(operands[2])],
            "extends": operands[1].startswith("!"),
        }

    def convert_address(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        window = SHARED_WINDOW if rest[-2] == "shared" else 0
        if rest not in (
            ["to", "global", "u64"],
            ["to", "shared", "u64"],
            ["global", "u64"],
            ["shared", "u64"],
        ):
            raise ValueError(mnemonic)
        return self.compute("sub.u64" if rest[0] == "to" else "add.u64", [*operands, str(window)])

    def where(self, mnemonic: str, rest: list[str], operands: list[str]) -> dict[str, object]:
        kind = {"shared": Kind.WHERE_SHARED, "global": Kind.WHERE_GLOBAL}[rest[0]]
        return {"kind": kind, "d": [self.place(operands[0])], "s": [self.place(operands[1])]}


def float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
