"""What a training loop of one's own is made of, an idea a file; `heterodyne.api.distributing` puts it together.

arguments        what was passed to `distribute`, checked before anything is captured
batches          a tensor, a tuple or a mapping as tensors by name
model_with_loss  a loss outside of the model as one module with it
whole            the model in one piece, to be measured
calls            which call a rank is in, for the watchdog
prediction       the model's outputs for all samples, under any plan
validation       loss and metrics over all samples
weights_back     the trained weights in the user's model at the end
callbacks        what others hear of
"""
