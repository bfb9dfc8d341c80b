"""The curious server: records a run's messages and tries simple, standard attacks on them.

A failed attack proves nothing: a better one may succeed. A successful attack shows what the server
learns, or, without TLS, anybody that reads the messages. ``suite.py`` has the attacks on what is
seen, ``deviating.py`` those of a server that lies. A method's ``attack.py`` says what its messages
show and which attacks apply.
"""
