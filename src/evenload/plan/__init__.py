"""Planners; and called, `evenload.plan(lengths, ...)`.

The function of users and the package of planners have one name, and importing the package puts it into `evenload`, so
the package itself is what can be called.
"""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from evenload.cli.plan_call import plan

        return plan(*arguments, **settings)

    @property
    def __signature__(self) -> Signature:
        from evenload.cli.plan_call import plan

        return signature(plan)


sys.modules[__name__].__class__ = _CallablePackage
