"""The data of a training: sizes of samples, and the effects of their spread.

media         sizes of pictures and audio from their headers, their tokens, and patches and windows by model.json
sizes         a conversation and its files -> its sizes
records       data.json and the records of a data set in the mllm format
lengths       lists of lengths, and Megatron's indexed data sets
describe      a data set -> its distribution
work          the sizes of one sample, and its work: linear in rows and in sums of squares
partition     items -> bins, with a bound on the heaviest bin
balance       a global batch -> replicas and microbatches
distribution  the file that planning and training read
statistics    quantiles with confidence, histograms, padding
"""
