"""The explorer: a real run's attention as one self-contained page."""

from __future__ import annotations

from .export import BudgetError, PageError, check_writable, write_page

__all__ = ["BudgetError", "PageError", "check_writable", "write_page"]
