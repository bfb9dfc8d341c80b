"""Common parts of all messages: keys, and the encoding of numbers and arrays."""
