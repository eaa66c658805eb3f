"""Plans: pure functions of shapes, ranks and options; no tensor, no communication."""
