from __future__ import annotations

import sys

import pytest

from tests import typing_examples


@pytest.mark.skipif(sys.version_info < (3, 10), reason="classmethod passes attributes on from 3.10 on")
@pytest.mark.usefixtures("nothing_compiled")
def test_the_typing_examples_also_run() -> None:
    typing_examples.main()
