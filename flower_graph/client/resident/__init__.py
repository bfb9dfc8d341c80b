"""Where the clients of a SuperNode live between two messages, and how messages reach them."""
