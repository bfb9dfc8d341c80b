"""What all messages share: keys on the wire, and how numbers and arrays are written and read."""
