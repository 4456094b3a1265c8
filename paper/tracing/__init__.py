"""The board of tracing: are attackers found, and are honest clients left alone?"""
