"""How fast it is: this sidecar with everything on, beside what one would use instead, in one run on one machine.
START HERE: `suite`.

machine      cores, pinning, whether other programs are at work, and what the system says of a process
upstream     nginx in Bedrock's place, quick enough not to be the limit
contenders   what is compared: no proxy, nginx, Envoy, a plain aiohttp proxy, Portkey, LiteLLM, this sidecar
load         calls to one of them: closed-loop by wrk or `client`, at a pace by `client`
client       a program: calls over HTTP/2, and calls at a pace over either protocol
streams      event streams, made of `frames`, from outside `driver`, a program that is at both their ends
starts       from nothing to the first answer, with either store
flame        where the time goes: a flame graph, and the share of each step
suite        all of that in its order, with the `figures` of every round
report       the page, from the figures: `goals`, `sections` with their words, `plots`
control      the control API: how long it takes, and how much it can do (control_*)
scaling      what a sidecar costs with more apps and more open streams (scaling_*)
hour         whether a sidecar stays as it is through an hour of load
"""
