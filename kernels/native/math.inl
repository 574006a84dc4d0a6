// Functions of one vector, made of the words of simd/.
