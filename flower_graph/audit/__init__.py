"""The curious server: records a run's messages and tries simple, standard attacks on them.

An attack that fails proves nothing: a better one may succeed. One that succeeds shows what the
server, or whoever reads the messages where there is no TLS, learns.
"""
