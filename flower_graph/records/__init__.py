"""Messages, and the one place where tensors turn into Flower records.

``keys`` holds all keys on the wire and the two ways of writing numbers; every method has a file of
messages. A message is a dataclass that writes itself into a ``RecordDict`` and reads itself from
what a ``NumPyClient`` is given, or the other way round.
"""
