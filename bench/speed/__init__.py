"""How fast it is: this sidecar with everything on, beside what one would use instead, in one run on one machine.

machine      cores, pinning, and what the system says of a process: time used, memory
upstream     what stands for Bedrock, quick enough not to be the limit
contenders   what is compared: nobody between, nginx, a plain proxy, LiteLLM, and this
load         requests as fast as they are answered, by wrk and h2load
paced        latency added at a quiet pace
streams      event streams, frame by frame; driver: the program at both their ends (frames, ends: of what, and where)
starts       from nothing to the first answer, with either store
flame        where the time goes
suite        all of that in its order, with the figures (`figures`) of every round
control      the control API: how long it takes, and how much it can do; with files of its own (control_*)
scaling      what a sidecar costs with more apps and more open streams (scaling_*)
hour         whether a sidecar stays as it is through an hour of load
rooms        of a flame graph, what each room of the pipeline takes
report       the page, from the figures: goals, sections with their prose, plots
"""
