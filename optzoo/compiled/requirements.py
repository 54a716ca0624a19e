"""Requirements on a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.checks import check_flags, check_not_negative, check_positive
from .hlo import COLLECTIVES

_SHARE = 1.05  # of the bytes that a device has of arrays that are divided: small ones are whole


class RequirementError(AssertionError):
    """Raised if a program does not meet :meth:`optzoo.compiled.CompileReport.require`.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> report = optzoo.compile_report(jax.jit(jnp.sin), jnp.ones(8), device="cpu")
        >>> try:
        ...     report.require(peak=63)
        ... except optzoo.compiled.RequirementError as error:
        ...     print(error)
        the program for 'cpu' is not as required:
          peak: 64 bytes, at most 63 are allowed
    """


@dataclasses.dataclass(frozen=True)
class Required:
    """The arguments of ``CompileReport.require``, which describes them."""

    donated: bool
    same_shardings: bool
    divided: Mapping[int | str, int] | None
    collectives: Mapping[str, float] | None
    large: float | None
    temporaries: float | None
    peak: float | None

    def __post_init__(self) -> None:
        check_flags(donated=self.donated, same_shardings=self.same_shardings)
        if all(value is None or value is False for value in vars(self).values()):
            raise ValueError("require needs at least one requirement, such as donated=True")
        for name, value in self._limits().items():
            check_not_negative(**{name: value})
        for kind, value in (self.collectives or {}).items():
            if kind not in COLLECTIVES:
                raise ValueError(f"collectives must be of {COLLECTIVES}, got {kind!r}")
            check_not_negative(**{f"collectives[{kind!r}]": value})
        for where, number in (self.divided or {}).items():
            check_positive(**{f"divided[{where!r}]": number})

    def unmet(self, report: Any) -> Iterator[str]:
        """A line for each requirement that the program of a report does not meet."""
        if self.donated:
            for name, size in report.not_reused.items():
                yield f"donated: no result reuses the memory of {name}, {size:,} bytes"
        if self.same_shardings:
            yield from self._other_shardings(report)
        for where, number in (self.divided or {}).items():
            yield from _not_divided(report, where, number)
        if self.collectives is not None:
            sent = dict[str, int]()
            for c in report.collectives:
                sent[c.kind] = sent.get(c.kind, 0) + c.nbytes
            for kind, size in sent.items():
                if kind not in self.collectives:
                    yield f"collectives: {kind} of {size:,} bytes, none is allowed"
                elif size > self.collectives[kind]:
                    most = self.collectives[kind]
                    yield f"collectives: {kind} of {size:,} bytes, at most {most:,} are allowed"
        for name, most in self._limits().items():
            found = len(report.large) if name == "large" else getattr(report, name)
            if found > most:
                unit = "operations" if name == "large" else "bytes"
                yield f"{name}: {found:,} {unit}, at most {most:,} are allowed"

    def _limits(self) -> dict[str, float]:
        names = ("large", "temporaries", "peak")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _other_shardings(self, report: Any) -> Iterator[str]:
        for p in report.placements:
            if p.returned is None and p.donated:
                yield f"same_shardings: there is no result for {p.name}"
            elif p.returned is False:
                yield f"same_shardings: the result for {p.name} has another sharding"


def _not_divided(report: Any, where: int | str, number: int) -> Iterator[str]:
    found = [p for p in report.placements if p.argument == where]
    if not found:
        raise ValueError(f"divided must name arguments that the program reads, got {where!r}")
    whole, here = sum(p.nbytes for p in found), sum(p.on_device for p in found)
    if here > _SHARE * whole / number:
        largest = max(found, key=lambda p: p.on_device - p.nbytes / number)
        yield (
            f"divided: a device has {here:,} of the {whole:,} bytes of argument {where!r}, more "
            f"than 1/{number}; of {largest.name} {largest.on_device:,} of {largest.nbytes:,}"
        )
