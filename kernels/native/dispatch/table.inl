// Fills the table from the kernels of this namespace; the last include of kernels.inl.
const Kernels kTable = {
    PDS_ISA,  encode,       linear,       matrix_row,    rms_norm,  layer_norm,
    gated,    activated,    xielu,        sigmoid,       exponential,
    rope,     add_bias,     scale,        soft_cap,      store_kv,  attend,
    attend_scratch,         attend_tiles, attend_merge,  argmax,    gumbel_argmax,
    apply_bitmask,          gumbel_at,
    filter_floor,           kth_score,    filter_scratch, log_sum_exp,
};
