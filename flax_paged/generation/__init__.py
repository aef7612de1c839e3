"""Generating text with a module: the engine, its scheduler and page pool, and sampling."""
