"""Exact rollback of prompt caches: one undo per cache class, and the round that drives them."""
