"""The command line, layer 9: parse, call, print. See README.md in this folder.

Neighbours: `main.py` holds the commands; `report.py` and `checkpoint.py` what they print. Nothing here imports torch,
ray or boto3 before a command needs it.
"""
