"""The exam: does a model know what the text says?"""
