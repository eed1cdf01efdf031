def serves(*a):
    return False


TritonStep = None
