"""The commands; the only room that may open the others."""
