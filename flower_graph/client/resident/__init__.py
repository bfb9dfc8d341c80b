"""Where a SuperNode's clients live between two messages, and how messages reach them."""
