"""Bedrock's HTTP face: the data port in HTTP/1.1 and HTTP/2, and answers that an SDK understands."""
