"""The way to Bedrock and back: how a path is read and built, how a request is signed, how an answer's frames are read.

model_path, sigv4, eventstream      pure: no asyncio, no sockets, no clock
"""
