"""One broker in front of the oracles of all nodes of a Ray cluster: `python -m sandbox serve --fleet=ray`.

    broker (this host)                                        node
    scheduler, queue, verdicts      crew.py
      fleet.py  <--lines-->  driver.py  ----- Ray ----->  slot.py (one actor an oracle)
      listener.py  <=========== TCP, lines ===========>  sandbox.oracle.worker, its child

Ray starts things, watches nodes and ends things; it carries no evaluation. Each actor (`slot`) opens a TCP connection to the broker, shows
the token that it was started with, and hands that very socket to the oracle process, which speaks on it as it does on the socket pair of
a server without a fleet. So there is nobody between an oracle and the broker: no relay adds to a gate's latency or runs beside what is
timed, Ray's object store and its calls stay out of it, and a connection that closes is the news that its oracle has gone.

Ray's driver is a process of its own: it ends with the cluster that it is attached to, and the queue must not.

Signs of life: the kernel of a host that has gone answers no TCP probe (`listener.keep_alive`, 10 s); Ray looks after nodes whose processes hang.

What is not here: encryption. Connections are as plain as Ray's own, so both belong on a network of their own; whoever may submit work to a
Ray cluster may run anything on it anyway.
"""


class FleetError(RuntimeError):
    """The fleet cannot be had; the text says why and what to do."""
