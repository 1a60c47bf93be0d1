"""What the page says beside its figures. Pure."""

OPENING = """\
# Performance

What this sidecar costs on the way to Bedrock, measured beside what one might put there instead: nginx, which only
passes bytes on; a proxy of thirty lines on aiohttp; LiteLLM's pass-through for Bedrock; and nobody. All of it ran
in one go on one machine.

**Everything is on** here: the caller's token is verified, a label chosen by quotas, rate limits for requests and
tokens are kept, the call signed for AWS, its spend written to the journal before and after, the answer metered and
sent to the store. The others do none of this, but that LiteLLM checks one key and signs; it keeps no spend here,
having no database. Price Keeper is there twice: as it comes, in pure Python, and with its hot path compiled from the
same sources (`make compiled`).

Bedrock itself takes from some hundred milliseconds to a minute for an answer, which is not in any figure: what
stands for it answers at once."""

REQUESTS = """\
Each request carries {question} kB of question and {answer} kB of answer, over connections that stay open. The next
one is sent when the last is answered, so the load is never more than the connections. The proxy has one core to
itself; the load and what stands for Bedrock share the other."""

HTTP2 = """\
The same over HTTP/2 in plain text, with one stream at a time on each connection. Upstream it is HTTP/1.1. The other
two do not speak it."""

DELAY = """\
What a caller waits more than with nobody between, when there is no queue: 50 requests a second on one connection,
and one after the other. At a quiet pace processors sleep between two requests, and waking them is in the figure."""

STREAMS = """\
Sixteen streams of `ConverseStream`, each of a thousand frames of 192 bytes, each frame sent by itself, in three
ways. As soon as there is room for it: then several arrive together. When the one before has come through: then each
is alone, which is how a model sends them, and the proxy as busy as it can be. And 4,000 a second over all streams,
for what a frame costs and how long it takes."""

MEMORY = """\
Proportional set size, of a process with its children: shared pages count by their parts. What the kernel holds for
sockets is not in it. A silent stream is one that has begun and of which nothing more comes."""

STARTS = """\
From the start of the process to its first answered call, when it has run on this machine before. The prices stand
in the configuration. DynamoDB is a stand-in on the other core, so a network is not in the figure."""

WORKERS = """\
With `--workers 2` calls are spread over two processes. Both cores are shared with the load here, so the requests a
second say little; the CPU of a request says what the second process costs."""

FLAME = """\
## Where the time goes

By function, on a sidecar in pure Python that answers calls over HTTP/1.1; the wider, the more time. Only the time in
which Python runs is in it: what the kernel and the event loop take before they call it is not. Open the picture by
itself to look closer."""

ROOMS = """\
Each room's own part of it. None stands out, and the hashes, the parser and JSON are C already."""

LIMIT = """\
What has been done to it, and what was tried and left, is written down: [a short way for most calls, and writes that
go together](decisions/0018-a-short-way-for-most-calls.md), [an optional compiled
build](decisions/0017-an-optional-compiled-build.md), [HTTP/2 frames of its
own](decisions/0049-http2-frames-are-our-own.md)."""

AGAINST_PYTHON = """\
**How much of nginx Python can be** depends on the machine: nginx is mostly the kernel's work, and how quickly Python
runs beside that differs. The measure for it is the plain proxy, which does nothing at all: here it comes to
{plain:.3f} of nginx. On the machine for which the goal of 0.40 was set it came to 0.16, and so fast a prototype as was
ever built there to 2.8 times the plain proxy. Here Price Keeper comes to {ours:.1f} times the plain proxy with
everything on, and compiled to {compiled:.1f} times."""

METHOD = """\
## How it was measured

`make bench` does all of it again and writes this page; it wants Linux, nginx, wrk and two cores that do nothing
else, and h2load for HTTP/2. `python -m bench.speed --quick` shows in two minutes whether it works. The figures are
in [results.json]({folder}/results.json).

Rounds go over all contenders in turn, in another order each time, so that a slow minute of the machine hits them
all. A figure is the median over the rounds, in brackets the lowest and the highest. CPU is what the system counts
for the process and its children, its share of the kernel's work included. Access logs are off everywhere. The load
is wrk for HTTP/1.1, h2load for HTTP/2, and for streams one program that is both Bedrock and the callers, so it
knows of each frame when it was sent and when it came. It compares the first stream of each caller with what was
sent, byte by byte."""
