"""explain: the mask, the memory, the traffic and the limit of a kernel, before anything runs.

`variant` makes an `Account` of a spec and a call; terminal, JSON and pictures show the account.
"""
