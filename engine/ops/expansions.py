from dataclasses import replace
from flowrun.engine.sbp import *
from flowrun.engine.graph import *
def needs_expansion(op,tensors):
    if 'softmax' not in op.target: return False
    return any(isinstance(s,Split) and s.dim==1 for s in op.in_sbp[0])
def expand(op,tensors):
    x=op.args[0].name; full=op.in_sbp[0]; T=tensors[x]
    def st(kind): return tuple(kind if isinstance(s,Split) and s.dim==1 else s for s in full)
    stat=st(B); ops=[];ts=[]
    def mk(n,target,args,ins,outs,shape):
        name=op.name+n; ts.append(Tensor(name,shape,T.dtype)); ops.append(replace(op,name=name,target=target,args=args,kwargs=(),outputs=(name,),in_sbp=ins,out_sbp=(outs,))); return Ref(name)
    row=(T.shape[0],1)
    if 'backward' in op.target:
        g=op.args[0]; o=op.args[1]
        t=mk('_t','aten.sum.dim_IntList',(g,(1,),True),(full,),st(P),row)
        e=mk('_e','aten.exp.default',(o,),(full,),full,T.shape)
        u=mk('_u','aten.mul.Tensor',(e,t),(full,stat),full,T.shape)
        ops.append(replace(op,target='aten.sub.Tensor',args=(g,u),kwargs=(),in_sbp=(full,full),out_sbp=(full,)))
    else:
        X=op.args[0]
        m=mk('_m','aten.amax.default',(X,(1,),True),(full,),st(P_MAX),row)
        s=mk('_s','aten.sub.Tensor',(X,m),(full,stat),full,T.shape)
        e=mk('_e','aten.exp.default',(s,),(full,),full,T.shape)
        z=mk('_z','aten.sum.dim_IntList',(e,(1,),True),(full,),st(P),row)
        l=mk('_l','aten.log.default',(z,),(stat,),stat,row)
        ops.append(replace(op,target='aten.sub.Tensor',args=(s,l),kwargs=(),in_sbp=(full,stat),out_sbp=(full,)))
    return tuple(ops),tuple(ts)
