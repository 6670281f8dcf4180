"""Planners; the package itself is what users call, `evenload.plan(lengths, ...)`, because both have one name."""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from evenload.cli.plan import plan

        return plan(*arguments, **settings)

    @property
    def __signature__(self) -> Signature:
        from evenload.cli.plan import plan

        return signature(plan)


sys.modules[__name__].__class__ = _CallablePackage
