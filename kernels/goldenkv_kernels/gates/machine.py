"""Runs Pallas kernels address by address, as a GPU would, and reports what it would do wrong there.

Interpret mode hides four things. It pads ragged blocks, it clamps or wraps indices that are out of range, it
gives lanes that are masked off whatever lies there, and it runs the programs of a grid one after the other.
Here the very program that goes to the GPU (not the interpreted one) is executed on arrays that know their
length (`memory`), and `run` reports

- a load or store of a lane that is not masked off and lies outside its array, on any axis;
- two programs that write one element, or one that reads what another writes: on a GPU they race;
- a store to an input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from .memory import Block, Memory, poison

MOST_PROBLEMS = 20
"""More are not collected: one wrong index makes one in every program."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What `run` saw.

    Attributes:
        outputs: of the function, poison where a GPU leaves them undefined.
        problems: one line each; empty for a sound kernel.
        kernels: the names of the kernels that ran, in order.
    """

    outputs: Any
    problems: tuple[str, ...]
    kernels: tuple[str, ...]


def run(function: Callable, *args: Any) -> Findings:
    """Calls `function(*args)` and executes every Pallas kernel in it address by address.

    Args:
        function: it must not ask for interpret mode.
        args: arrays, or trees of them.

    Raises:
        NotImplementedError: a kernel uses what the Triton lowering lacks, or an effect that is unknown here.
        ValueError: no kernel was called: there is nothing to check.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    machine = _Machine()
    flat = machine.evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    if not machine.kernels:
        raise ValueError("the function calls no Pallas kernel")
    outputs = jax.tree.unflatten(jax.tree.structure(shape), [np.asarray(x) for x in flat])
    return Findings(outputs, tuple(machine.problems), tuple(machine.kernels))


def kernel_name(equation: Any) -> str:
    """The name that a `pallas_call` was given, or that of its function."""
    return str(equation.params.get("name") or equation.params["jaxpr"].debug_info.func_name)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive equations that touch no memory, compiled: `outs = function(*ins)`.

    `jaxpr` is where they stand; it is kept so that its id stays its own.
    """

    stop: int
    ins: list
    outs: list
    function: Callable
    jaxpr: Any


class _Machine:
    """Evaluates traced programs on concrete values. Control flow runs in Python, blocks pass like values."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.kernels: list[str] = []
        self.place: tuple[int, ...] = ()  # of the program that runs, in the grid
        self.grid: tuple[int, ...] = ()
        self.wanted = True  # whether anything uses the results of the equation that runs
        self._segments: dict[tuple[int, int], _Segment] = {}
        self._special: dict[int, tuple[Any, bool]] = {}
        self._used: dict[int, tuple[Any, set]] = {}

    def report(self, text: str) -> None:
        """Keeps a fault of the program that runs."""
        line = f"{self.kernels[-1]}, program {list(self.place)}: {text}"
        if len(self.problems) < MOST_PROBLEMS and line not in self.problems:
            self.problems.append(line)

    def evaluate(self, jaxpr: Any, consts: Sequence, args: Sequence) -> list:
        """The outputs of a jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        at = 0
        while at < len(jaxpr.eqns):
            equation = jaxpr.eqns[at]
            if self.is_special(equation):
                name = equation.primitive.name
                if name not in _RULES:
                    raise NotImplementedError(f"a kernel uses {name!r}, of which the checker knows nothing")
                self.wanted = not self.used(jaxpr).isdisjoint(equation.outvars)
                made = _RULES[name](self, equation, *map(read, equation.invars))
                env.update(zip(equation.outvars, made, strict=True))
                at += 1
            else:
                segment = self.segment(jaxpr, at)
                env.update(zip(segment.outs, segment.function(*map(read, segment.ins)), strict=True))
                at = segment.stop
        return [read(v) for v in jaxpr.outvars]

    def is_special(self, equation: Any) -> bool:
        """Whether an equation touches memory, asks which program it is in, or holds one that does."""
        found = self._special.get(id(equation))
        if found is None:
            answer = (
                bool(equation.effects)
                or equation.primitive.name in ("program_id", "num_programs", "pallas_call", "debug_barrier")
                or any(self.is_special(e) for jaxpr in inner_jaxprs(equation) for e in jaxpr.eqns)
            )
            found = self._special[id(equation)] = (equation, answer)
        return found[1]

    def used(self, jaxpr: Any) -> set:
        """The variables that a jaxpr reads or returns."""
        if id(jaxpr) not in self._used:
            atoms = itertools.chain(jaxpr.outvars, *(e.invars for e in jaxpr.eqns))
            self._used[id(jaxpr)] = (jaxpr, {v for v in atoms if not isinstance(v, Literal)})
        return self._used[id(jaxpr)][1]

    def segment(self, jaxpr: Any, start: int) -> _Segment:
        """The equations from `start` on that touch no memory."""
        found = self._segments.get((id(jaxpr), start))
        if found is None:
            stop = start
            while stop < len(jaxpr.eqns) and not self.is_special(jaxpr.eqns[stop]):
                stop += 1
            equations = jaxpr.eqns[start:stop]
            made = dict.fromkeys(v for e in equations for v in e.outvars)
            used = (v for e in equations for v in e.invars)
            ins = list(dict.fromkeys(v for v in used if not isinstance(v, Literal) and v not in made))
            behind = [v for e in jaxpr.eqns[stop:] for v in e.invars] + list(jaxpr.outvars)
            later = {v for v in behind if not isinstance(v, Literal)}
            outs = [v for v in made if v in later]
            function = jax.jit(_straight(equations, ins, outs))
            found = self._segments[id(jaxpr), start] = _Segment(stop, ins, outs, function, jaxpr)
        return found

    def launch(self, equation: Any, args: Sequence) -> list[np.ndarray]:
        """All programs of one `pallas_call`, in order."""
        mapping = equation.params["grid_mapping"]
        if mapping.num_dynamic_grid_bounds or mapping.num_index_operands or mapping.scratch_avals:
            raise NotImplementedError("the Triton lowering has no dynamic grid, scalar prefetch or scratch")
        self.kernels.append(kernel_name(equation))
        self.grid = tuple(mapping.grid)
        blocks = mapping.block_mappings
        memories = [
            Memory(f"input {i} ({b.origin})", np.array(a))
            for i, (a, b) in enumerate(zip(args, blocks, strict=False))  # the outputs follow
        ]
        into = {out: number for number, out in equation.params["input_output_aliases"]}
        for number, b in enumerate(blocks[len(args) :]):
            blank = Memory(f"output {number} ({b.origin})", poison(b.array_aval.shape, b.array_aval.dtype))
            memories.append(memories[into[number]] if number in into else blank)
            memories[-1].watch()
        places = list(itertools.product(*map(range, self.grid)))
        starts = [_starts(b, places) for b in blocks]
        axes = [
            tuple(i for i, n in enumerate(b.block_shape) if type(n).__name__ != "Squeezed") for b in blocks
        ]
        shapes = [tuple(b.ref_aval.shape) for b in blocks]
        for number, self.place in enumerate(places):
            refs = [
                Block(memory, start[number], seen, shape, number, self.report)
                for memory, start, seen, shape in zip(memories, starts, axes, shapes, strict=True)
            ]
            self.evaluate(equation.params["jaxpr"], (), refs)
        return [memory.values for memory in memories[len(args) :]]


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The programs that an equation holds: bodies of loops, branches, kernels."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def _straight(equations: Sequence, ins: Sequence, outs: Sequence) -> Callable:
    def function(*values: Any) -> list:
        env = dict(zip(ins, values, strict=True))
        for e in equations:
            args = [v.val if isinstance(v, Literal) else env[v] for v in e.invars]
            made = e.primitive.bind(*args, **e.primitive.get_bind_params(e.params))
            env.update(zip(e.outvars, made if e.primitive.multiple_results else [made], strict=True))
        return [env[v] for v in outs]

    return function


def _starts(block: Any, places: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each program the first element of its block, axis by axis."""
    axes = [np.array(axis, np.int32) for axis in zip(*places, strict=True)]
    if not axes:
        return [tuple(int(s) for s in block.compute_start_indices_interpret(()))]
    found = jax.vmap(lambda *place: block.compute_start_indices_interpret(place))(*axes)
    columns = [np.broadcast_to(np.asarray(c), len(places)).tolist() for c in found]
    return list(zip(*columns, strict=True)) if columns else [()] * len(places)


# Rules ------------------------------------------------------------------------------------------------------


def _get(machine: _Machine, equation: Any, ref: Block, *index: Any) -> list:
    return [ref.load(jax.tree.unflatten(equation.params["tree"], index))]


def _swap(machine: _Machine, equation: Any, ref: Block, value: Any, *index: Any) -> list:
    return _exchange(machine, ref, jax.tree.unflatten(equation.params["tree"], index), value, None)


def _masked_load(machine: _Machine, equation: Any, *flat: Any) -> list:
    ref, index, mask, other = jax.tree.unflatten(equation.params["args_tree"], flat)
    return [ref.load(index, mask, other)]


def _masked_swap(machine: _Machine, equation: Any, *flat: Any) -> list:
    ref, index, value, mask = jax.tree.unflatten(equation.params["args_tree"], flat)
    return _exchange(machine, ref, index, value, mask)


def _exchange(machine: _Machine, ref: Block, index: Sequence, value: Any, mask: Any) -> list:
    """A store; the old value is read only where the kernel uses it."""
    old = [ref.load(index, mask) if machine.wanted else None]
    ref.store(index, value, mask)
    return old


def _call(machine: _Machine, equation: Any, *args: Any) -> list:
    jaxpr = equation.params["jaxpr"] if "jaxpr" in equation.params else equation.params["call_jaxpr"]
    return machine.evaluate(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), args)


def _cond(machine: _Machine, equation: Any, which: Any, *args: Any) -> list:
    branches = equation.params["branches"]
    branch = branches[int(np.clip(int(which), 0, len(branches) - 1))]
    return machine.evaluate(branch.jaxpr, branch.consts, args)


def _while(machine: _Machine, equation: Any, *args: Any) -> list:
    p = equation.params
    asked, shared = args[: p["cond_nconsts"]], args[p["cond_nconsts"] :][: p["body_nconsts"]]
    carry = list(args[p["cond_nconsts"] + p["body_nconsts"] :])
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    while bool(machine.evaluate(test.jaxpr, test.consts, [*asked, *carry])[0]):
        carry = machine.evaluate(body.jaxpr, body.consts, [*shared, *carry])
    return carry


def _scan(machine: _Machine, equation: Any, *args: Any) -> list:
    p = equation.params
    if "ft_in" in p:  # from JAX 0.11 on
        shares, carries, _ = (len(group) for group in p["ft_in"].unpack())
    else:
        shares, carries = p["num_consts"], p["num_carry"]
    shared, carry, streams = args[:shares], list(args[shares:][:carries]), args[shares + carries :]
    body, steps = p["jaxpr"], range(p["length"])
    made = {}
    for i in reversed(steps) if p["reverse"] else steps:
        out = machine.evaluate(body.jaxpr, body.consts, [*shared, *carry, *(s[i] for s in streams)])
        carry, made[i] = out[:carries], out[carries:]
    avals = [v.aval for v in equation.outvars[carries:]]
    if not made:
        return carry + [np.zeros(a.shape, a.dtype) for a in avals]
    return carry + [np.stack([np.asarray(made[i][n]) for i in steps]) for n in range(len(avals))]


_RULES: dict[str, Callable[..., list]] = {
    "get": _get,
    "swap": _swap,
    "masked_load": _masked_load,
    "masked_swap": _masked_swap,
    "program_id": lambda machine, equation: [np.int32(machine.place[equation.params["axis"]])],
    "num_programs": lambda machine, equation: [np.int32(machine.grid[equation.params["axis"]])],
    "debug_barrier": lambda machine, equation: [],
    "pallas_call": lambda machine, equation, *args: machine.launch(equation, args),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "custom_jvp_call"), _call),
}
