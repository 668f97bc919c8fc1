// The table of an instruction set's kernels; included behind generic.inl.

#define EDGESPEC_TEXT_(x) #x
#define EDGESPEC_TEXT(x) EDGESPEC_TEXT_(x)

extern const Kernels kTable;
const Kernels kTable = {EDGESPEC_TEXT(EDGESPEC_SET), normalize, quantize, project, dots, attend,
                        attend_all, convolve, decay, recur, multiply, cap, gather, largest, sum_exp};
