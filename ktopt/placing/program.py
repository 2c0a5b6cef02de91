"""A mixed-integer program by names of its variables, solved by HiGHS through scipy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktopt.diagnostics import KtoptError

TIME_LIMIT_S = 20.0
MIB = float(1 << 20)
WHOLE = 1e-9
"""How near to the best the solver has to come, relative to it, before it may stop."""

Name = tuple[Any, ...]
Term = tuple[Name, float]
Values = Mapping[Name, int]


@dataclass
class Program:
    """Whole-number variables from 0 on by name, with upper bounds and costs, and rows that bound sums of them."""

    index: dict[Name, int] = field(default_factory=dict)
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    rows: list[tuple[list[Term], float, float]] = field(default_factory=list)

    def variable(self, name: Name, upper: float, cost: float = 0.0) -> None:
        self.index[name] = len(self.cost)
        self.cost.append(cost)
        self.upper.append(upper)

    def add(self, name: Name, cost: float) -> None:
        self.cost[self.index[name]] += cost

    def row(self, terms: Iterable[Term], low: float, high: float) -> None:
        self.rows.append((list(terms), low, high))

    def solved(self) -> tuple[Values, bool] | None:
        """The variables' values at the least cost, and whether none is less; None where there are none. KtoptError without scipy,
        or where nothing was found in time."""
        if any(not terms and not low <= 0 <= high for terms, low, high in self.rows):
            return None
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise KtoptError('placing needs a solver, which isn\'t installed: pip install "ktopt[place]"') from None
        entries = [(number, self.index[name], value) for number, (terms, _, _) in enumerate(self.rows) for name, value in terms]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self.rows), len(self.cost)))
        found = milp(
            np.array(self.cost),
            integrality=np.ones(len(self.cost)),
            bounds=Bounds(np.zeros(len(self.cost)), np.array(self.upper)),
            constraints=LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]),
            options={"mip_rel_gap": WHOLE, "time_limit": TIME_LIMIT_S},
        )
        if found.status == 2:
            return None
        if found.x is None:
            raise KtoptError(f"the solver found no placement in {TIME_LIMIT_S:.0f} seconds: {found.message}")
        return {name: round(found.x[at]) for name, at in self.index.items()}, found.status == 0
