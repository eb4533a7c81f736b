"""What the tests share: threads with a limit, programs in processes of their own, counting backends."""

from __future__ import annotations
