"""`make gpu-check`: is the code that runs on a GPU right there, and how fast is it?"""
